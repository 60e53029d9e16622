"""Which steps are emulated: rows of options that meet each other at least once, two by two."""

from itertools import combinations, product

Row = dict[str, str]


def pairs(row):
    return set(combinations(sorted(row.items()), 2))


def pairwise(factors, allowed):
    """Rows in which every two values of different factors meet that meet in any allowed row.

    Args:
        factors: a list of values for each name.
        allowed: whether a row makes sense.
    """
    every = [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]
    rows = {i: pairs(row) for i, row in enumerate(every) if allowed(row)}
    by_pair = {}
    for i, found in rows.items():
        for pair in found:
            by_pair.setdefault(pair, []).append(i)
    missing, chosen = dict.fromkeys(by_pair), []
    while missing:
        scarce = min(missing, key=lambda pair: len(by_pair[pair]))
        best = max(by_pair[scarce], key=lambda i: len(rows[i] & missing.keys()))
        chosen.append(every[best])
        for pair in rows[best] & missing.keys():
            del missing[pair]
    return chosen
