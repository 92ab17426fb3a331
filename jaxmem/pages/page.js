(() => {
  const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
  function bytes(count) {
    let unit = 0;
    while (count >= 999.5 && unit < UNITS.length - 1) { count /= 1024; unit += 1; }
    const digits = unit === 0 ? 0 : count < 9.995 ? 2 : count < 99.95 ? 1 : 0;
    return `${count.toFixed(digits)} ${UNITS[unit]}`;
  }
  function filled(tip, title, lines) {
    const head = document.createElement("b");
    head.textContent = title;
    tip.replaceChildren(head, ...lines.filter(Boolean).map((text) => {
      const line = document.createElement("div");
      line.textContent = text;
      return line;
    }));
  }
  function place(tip, plot, event) {
    const frame = plot.getBoundingClientRect();
    tip.hidden = false;
    const x = event.clientX - frame.left, y = event.clientY - frame.top;
    const left = Math.min(x + 14, frame.width - tip.offsetWidth);
    const above = y > frame.height / 2;
    tip.style.left = `${Math.max(left, Math.min(0, frame.width - tip.offsetWidth))}px`;
    tip.style.top = `${above ? y - tip.offsetHeight - 12 : y + 16}px`;
  }
  function sample(steps, at) {
    let found = 0;
    for (let i = 0; i < steps.length; i += 1) { if (steps[i][0] <= at) found = i; }
    return found;
  }
  function hover(chart) {
    const plot = chart.querySelector(".jm-plot"), tip = chart.querySelector(".jm-tip");
    const known = JSON.parse(chart.querySelector("script").textContent);
    function show(event) {
      const shape = event.target.closest("[data-m]");
      if (!shape) { tip.hidden = true; return; }
      if (shape.dataset.i !== undefined) {
        const [title, ...lines] = known.buffers[shape.dataset.i];
        filled(tip, known.strings[title], lines.map((i) => known.strings[i]));
      } else {
        const frame = plot.getBoundingClientRect();
        const at = known.across * (event.clientX - frame.left) / frame.width;
        const i = sample(known.steps, at), layer = known.layers[shape.dataset.layer];
        const [step, label, total] = known.steps[i];
        filled(tip, layer[0], [
          `${bytes(layer[1][i])} of ${bytes(total)}`, `step ${step}: ${label}`]);
      }
      place(tip, plot, event);
    }
    plot.addEventListener("pointermove", show);
    plot.addEventListener("pointerdown", show);
    plot.addEventListener("pointerleave", () => { tip.hidden = true; });
  }
  function press(buttons, button) {
    for (const each of buttons) each.setAttribute("aria-pressed", each === button);
  }
  for (const root of document.querySelectorAll(".jm:not([data-ready])")) {
    root.dataset.ready = "yes";
    root.querySelectorAll(".jm-chart").forEach(hover);
    const views = [...root.querySelectorAll("button[data-view]")];
    for (const button of views) {
      button.addEventListener("click", () => {
        const chosen = button.dataset.view;
        for (const each of views) {
          each.setAttribute("aria-pressed", each.dataset.view === chosen);
        }
        for (const svg of root.querySelectorAll("svg[data-view]")) {
          svg.toggleAttribute("hidden", svg.dataset.view !== chosen);
        }
      });
    }
    const modules = [...root.querySelectorAll(".jm-legend button")];
    const parts = [...root.querySelectorAll("svg [data-m]")];
    const groups = [...root.querySelectorAll("details[data-m]")];
    for (const button of modules) {
      button.addEventListener("click", () => {
        const off = button.getAttribute("aria-pressed") === "true";
        const only = off ? null : button.dataset.m;
        press(modules, off ? null : button);
        const out = (each) => only !== null && each.dataset.m !== only;
        for (const part of parts) part.classList.toggle("jm-dim", out(part));
        for (const group of groups) group.hidden = out(group);
      });
    }
  }
})();
