"""From a layout to a lower one, until the time is up.

Two ways, in turn. *Search* (`_layout_search`): exact, for a height that is tried for,
first the lowest there can be, then, when that is not found, one between it and the best
so far. In a large problem only what is alive where memory is nearly full is searched
for, its *kernel*; the rest has room and follows by best fit. *Promotion*: best fit
again, with what lay too high placed earlier, as TelaMalloc (doi
10.1145/3567955.3567961) places earlier what did not fit.
"""



