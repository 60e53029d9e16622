"""How a Triton kernel takes tiles of several kinds in one launch.

A pass has a function for the elements of some blocks, one for a tile of a kind, and the kernel. A
program finds its tensor and the number of its tile's kind in KINDS, the kinds of the plan, in one
number, tensor + kind * 2**25: room for 2**25 tensors and 64 kinds, of which there are 54.

With one kind all is one function in the machine code. With several there is one for each: were they
inlined, the compiler would give the tiles of all kinds one layout, and with it other accesses and
another order of sums than a kind has alone. So a tensor's bits do not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...codegen.analysis import indent

NUMBER = 2**25  # what counts the kind in the first column of `work`
TENSORS = ("address", "geometry", "work", "floats", "tables")  # arguments of every pass
STORAGE = ("P_TYPE", "G_TYPE", "BITS", "WHOLE", "ALIGN")  # a kind
CONSTANTS = (*STORAGE, "PIECE", "SCALED", "NB")  # PIECE: blocks at a time, if not NB

ENTRY = f"""\
entry = tl.load(work + 4 * tl.program_id(0))
if len(KINDS) == 1:
    t = entry.to(tl.int64)
else:
    t = (entry % {NUMBER}).to(tl.int64)
    kind = entry // {NUMBER}"""


def _function(
    name: str, tensors: Iterable[str], constants: Iterable[str], lines: list[str], options: str = ""
) -> str:
    given = ", ".join([*tensors, *(f"{constant}: tl.constexpr" for constant in constants)])
    return f"@triton.jit{options}\ndef {name}({given}):\n{indent(lines, 4)}"


def call_tile(name: str, tensors: Iterable[str], piece: str, blocks: str) -> str:
    """The call of a pass's function for so many blocks of a tile from the block `piece` on."""
    given = ["t", *tensors, piece, *STORAGE, "SCALED", blocks]
    return f"{name}_tile({', '.join(given)})"


def kernel(
    name: str, tile: list[str], by_kind: list[str], tensors: Sequence[str], guard: str = ""
) -> str:
    """The kernel of a pass and its functions.

    Args:
        name: of the pass.
        tile: what to do with the NB blocks of a tile from `piece` on.
        by_kind: what to do with a tile of a kind, by means of `call_tile`.
        tensors: arguments of the kernel.
        guard: what may end a program before; a function has to run to its end.
    """
    inline, called, arguments = f"{name}_inline", f"{name}_called", ["t", *tensors]
    forward = f"{inline}({', '.join([*arguments, *CONSTANTS])})"

    def call(function: str, i: str) -> str:
        kind = [f"KINDS[{i}][{k}]" for k in range(len(STORAGE) + 1)]
        return f"{function}({', '.join([*arguments, *kind, 'SCALED', 'NB'])})"

    dispatch = [
        *ENTRY.splitlines(),
        *guard.splitlines(),
        "if len(KINDS) == 1:",
        "    " + call(inline, "0"),
        "else:",
        "    for i in tl.static_range(len(KINDS)):",
        "        if kind == i:",
        "            " + call(called, "i"),
    ]
    in_kernel = (*(["GUARDED"] if guard else []), "KINDS", "SCALED", "NB")
    return "\n\n\n".join([
        _function(f"{name}_tile", [*arguments, "piece"], (*STORAGE, "SCALED", "NB"), tile),
        _function(inline, arguments, CONSTANTS, by_kind),
        _function(called, arguments, CONSTANTS, [forward], "(noinline=True)"),
        _function(name, tensors, in_kernel, dispatch),
    ])  # fmt: skip
