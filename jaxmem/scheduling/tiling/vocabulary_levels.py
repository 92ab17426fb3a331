"""Which loop over the vocabulary does what: how many must be done before it."""

from dataclasses import replace
from typing import Any

from jaxmem import _compat
from jaxmem.ir import primitives
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.scans import is_var
from jaxmem.ir.shards import Shardings
from jaxmem.scheduling.tiling.vocabulary import CutAxis
from jaxmem.scheduling.tiling.vocabulary_plan import Loop, OnlineSum, VocabularyLoops

MOST_TIMES = 3  # that logits are computed: else they cost more than they save


def loops_of(
    graph: JaxprGraph, found: CutAxis, shardings: Shardings | None = None
) -> VocabularyLoops | str:
    """The loops; or why there are none.

    `shardings`: how arrays are sharded over devices, where that is known.
    """
    loops = _Levels(graph, found).result()
    if isinstance(loops, str) or shardings is None:
        return loops
    return replace(loops, shardings=shardings)


class _Levels:
    """How many loops must be done before a value is there."""

    def __init__(self, graph: JaxprGraph, found: CutAxis):
        self.graph, self.found = graph, found
        self.known: dict[Any, int] = {}  # loops done before a whole value is there
        self.inside: dict[Any, int] = {}  # and before any block of it can be made
        self.online: dict[int, OnlineSum] = {}
        self.level: dict[int, int] = {}
        for i, eqn in enumerate(graph.eqns):
            if i in found.cut:
                self._cut(i, eqn)
            if i not in found.cut or i in found.repeated:
                level = max(map(self._whole, eqn.invars), default=0)
                self.known.update(dict.fromkeys(eqn.outvars, level))

    def _whole(self, a) -> int:
        return self.known.get(a, 0) if is_var(a) else 0

    def _operand(self, a, axis: int | None) -> int:
        cut = axis is not None and is_var(a) and a in self.inside
        return self.inside[a] if cut else self._whole(a)

    def _of_operands(self, i: int) -> int:
        ins = self.found.cut[i].operands(self.graph.eqns[i])
        return max((self._operand(a, d) for a, d in ins), default=0)

    def _cut(self, i: int, eqn) -> None:
        level = self._of_operands(i)
        if self.found.cut[i].op:
            online = self._online(i) if primitives.is_reduce_sum(eqn) else None
            if online is not None:
                self.online[i] = online
                level = self.level[online.most]
            self.level[i] = level
        else:
            self.inside.update(dict.fromkeys(eqn.outvars, level))
        self.known.update(dict.fromkeys(eqn.outvars, level + 1))

    def _online(self, i: int) -> OnlineSum | None:
        """A sum of exponentials, times what is known before its maximum is."""
        factors: list[Any] = []
        eqn = self._maker(self.graph.eqns[i].invars[0])
        while eqn is not None and eqn.primitive.name in ("convert_element_type", "mul"):
            late = max(eqn.invars, key=self._block_level)
            factors += [a for a in eqn.invars if a is not late]
            eqn = self._maker(late)
        if eqn is None or eqn.primitive.name != "exp":
            return None
        shifted = self._maker(eqn.invars[0])
        if shifted is None or shifted.primitive.name != "sub":
            return None
        known = [shifted.invars[0], *factors]
        return self._rescalable(
            i, shifted.invars[1], max(map(self._block_level, known))
        )

    def _rescalable(self, i: int, subtracted, level: int) -> OnlineSum | None:
        """A sum of exponentials, if all that is subtracted comes from one maximum."""
        base = self._number_a_token(subtracted)
        ways = None if base is None else self._from_maximum(base)
        if base is None or ways is None or level > self.level[ways[0]]:
            return None
        sizes = (base.aval.shape, self.graph.eqns[i].outvars[0].aval.shape)
        one, other = ([d for d in shape if d > 1] for shape in sizes)
        return OnlineSum(i, ways[0], base, ways[1]) if one == other else None

    def _maker(self, a):
        i = self.graph.maker.get(a, -1) if is_var(a) else -1
        return self.graph.eqns[i] if i in self.found.cut else None

    def _block_level(self, a) -> int:
        return self._operand(a, 0)

    def _number_a_token(self, a):
        """What is subtracted, before it is sharded over the words."""
        made = self._maker(a)
        if made is not None and primitives.is_broadcast(made):
            a = made.invars[0]
        return a if is_var(a) and a not in self.found.axis else None

    def _from_maximum(self, base) -> tuple[int, tuple[int, ...]] | None:
        """The maximum that is all a value needs of the loops, and the way from it."""
        cone = self.graph.cone([base])
        found = self.found
        sums = {i for i in cone if i in found.cut and found.cut[i].op}
        outs = {self.graph.eqns[i].outvars[0]: i for i in sums}
        chain, reached, direct, others = [], set(), set(), set()
        for i in sorted(cone - found.cut.keys()):
            ins = set(filter(is_var, self.graph.eqns[i].invars))
            if ins & (outs.keys() | reached):
                chain.append(i)
                reached.update(self.graph.eqns[i].outvars)
                direct |= {outs[a] for a in ins if a in outs}
                others |= ins - reached - outs.keys()
        if base in outs:
            direct.add(outs[base])
        if len(direct) != 1:
            return None
        (most,) = direct
        later = any(self._whole(a) > self.level[most] for a in others)
        if found.cut[most].op != "max" or later:
            return None
        if any(_compat.has_side_effects(self.graph.eqns[i]) for i in chain):
            return None
        return most, tuple(chain)

    def result(self) -> VocabularyLoops | str:
        graph, cut = self.graph, self.found.cut
        late = [i for i in sorted(cut) if i not in self.found.repeated]
        outside = set(graph.outputs)
        for i, eqn in enumerate(graph.eqns):
            if i not in cut or i in self.found.repeated:
                outside.update(filter(is_var, eqn.invars))
        written = [
            (i, v)
            for i in late
            if not cut[i].op
            for v in graph.eqns[i].outvars
            if v in outside
        ]
        level = {i: self.level[i] for i in late if cut[i].op}
        level |= {i: self.inside[v] for i, v in written}
        needed = self._needed_inside()
        if not needed & level.keys():
            return "no reduction over it is needed inside"
        count = 1 + max(level.values())
        # what nothing inside needs is done last, with what is there then
        level = {i: k if i in needed else count - 1 for i, k in level.items()}
        loops = tuple(self._loop(k, level, written) for k in range(count))
        plan = VocabularyLoops(
            graph, self.found, loops, self._when(level, needed, count)
        )
        if plan.times > MOST_TIMES:
            return (
                f"logits would be computed {plan.times} times: reductions need others"
            )
        return plan

    def _needed_inside(self) -> set[int]:
        """Equations that something whole comes from, which a block needs."""
        wholes = set()
        for i, placements in self.found.cut.items():
            ins = placements.operands(self.graph.eqns[i])
            wholes |= {
                a for a, d in ins if is_var(a) and (d is None or a not in self.inside)
            }
        return self.graph.cone(wholes)

    def _when(
        self, level: dict[int, int], needed: set[int], count: int
    ) -> dict[int, int]:
        """How many loops are done before an equation outside of them."""
        done: dict[Any, int] = {}
        when: dict[int, int] = {}
        effects = 0  # they keep their order
        for i, eqn in enumerate(self.graph.eqns):
            if i in level:
                done.update(dict.fromkeys(eqn.outvars, level[i] + 1))
            elif i not in self.found.cut or i in self.found.repeated:
                ins = filter(is_var, eqn.invars)
                # what came after the logits, and no loop needs, stays behind the loops
                late = i > self.found.product and i not in needed
                least = count if late else 0
                when[i] = max((done.get(a, 0) for a in ins), default=0)
                when[i] = max(least, when[i])
                if _compat.has_side_effects(eqn):
                    when[i] = effects = max(effects, when[i])
                done.update(dict.fromkeys(eqn.outvars, when[i]))
        return when

    def _loop(self, k: int, level: dict[int, int], written: list) -> Loop:
        targets = {i for i, at in level.items() if at == k}
        blocks = self.inside.keys()
        eqns: set[int] = set()
        todo = list(targets)
        while todo:
            i = todo.pop()
            if i in eqns:
                continue
            eqns.add(i)
            ins = self.found.cut[i].operands(self.graph.eqns[i])
            cut = (a for a, d in ins if d is not None and is_var(a) and a in blocks)
            todo += [self.graph.maker[a] for a in cut]
        sums = tuple(sorted(i for i in targets if self.found.cut[i].op))
        online = (self.online[i] for i in sums if i in self.online)
        return Loop(
            tuple(sorted(eqns)),
            sums,
            tuple(v for i, v in written if i in targets),
            tuple(o for o in online if level[o.most] == k),
        )
