"""What `ScreenedHead` is made of.

bounds.py      the int8 copy, and why a bound of a score holds
kernels.py     the loops over the copy, compiled (intrinsics.py: what numba has no words for)
portable.py    the same without numba
scanner.py     one pass over the copy for some states, and the room it works in
query.py       one state: which rows can matter, and their exact scores
ranking.py     the order of exact scores
rejection.py   drawing from the softmax of all logits without computing them all
levels.py      the mass of rows that are not scored, within two ends
known.py       what these ends decide, and how many more rows are scored until they do
nucleus.py     drawing from what top_p and min_p leave; moments.py: the deviation of all logits
rows.py        the questions to one state, screened or dense
edits.py       penalties, biases and bans
stats.py       what was done; checks.py: what is refused; file.py: the copy on disk
entering.py    states and ids as the loops take them; warming.py: all loops compiled beforehand
loops.py       compiled loops or portable ones; weights.py: whether a copy is still of its head
"""
