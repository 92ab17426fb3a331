// A field above each long table: rows stay that have all the words typed into it.
const LONG = 20;

function filtered(table) {
  const field = document.createElement("input");
  field.type = "search";
  field.className = "filter";
  field.placeholder = "Search the table, e.g. Llama schedule";
  field.setAttribute("aria-label", field.placeholder);
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of table.tBodies[0].rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
  const place = table.closest(".table-wrapper") ?? table;
  place.before(field);
}

addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("article table")) {
    if (table.tBodies[0]?.rows.length > LONG) filtered(table);
  }
});
