"""The bytes that a step is said to move are those that the Numba engine's code touches.

The generated module is run as plain Python. Its primitives record every address and compute with
NumPy instead.
"""

import ast
import inspect
import itertools
import math
import re
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.common import registry
from benchmarks.static import traffic
from lowbit_optim_kernels.engines.numba import source as numba_source
from lowbit_optim_kernels.formats import FORMATS, OF_BITS
from lowbit_optim_kernels.rules import (
    adagrad,
    adam,
    ademamix,
    adopt,
    eve,
    lamb,
    lans,
    lion,
    rmsprop,
    schedule_free,
    sgd,
)

PAGE = Path(__file__).resolve().parent.parent / "docs" / "traffic.md"
FACTORIES = (
    adagrad.adagrad_rule, adam.adam_rule, ademamix.ademamix_rule, eve.eve_rule, lamb.lamb_rule,
    lans.lans_rule, lion.lion_rule, rmsprop.rmsprop_rule, sgd.sgd_rule, sgd.lars_rule,
    adopt.adopt_rule, schedule_free.schedule_free_rule,
)  # fmt: skip
ROWS, ROW = 2, 1400  # a full tile of four blocks, a tile of one, a short block
BLOCKS = ROWS * 6
AREA = 1 << 32  # distance between operands, and where scratch memory begins
WIDTH = {"f32": 4, "bf16": 2}


def every_rule():
    """(name, rule) for every choice of options of every factory, equal rules once."""
    for factory in FACTORIES:
        seen = set()
        switches = list(inspect.signature(factory).parameters)
        chosen = list(itertools.product((False, True), repeat=len(switches)))
        if "caution" in switches:  # beside every other switch it adds the same links
            chosen = [c for c in chosen if all(c) or not c[switches.index("caution")]]
        for options in chosen:
            rule = factory(*options)
            if rule not in seen:
                seen.add(rule)
                yield pytest.param(rule, id=f"{rule.name}-{''.join('01'[on] for on in options)}")


class Recorder:
    """Stands for what the module imports: notes what is read and written at which address."""

    def __init__(self, operands):
        """operands: names of areas; area k is [k AREA, (k + 1) AREA), scratch memory is beyond."""
        self.operands = operands
        self.touched = {(name, kind): [] for name in operands for kind in ("read", "write")}
        self.top = AREA * len(operands)
        self.taken = {}

    def note(self, kind, at, size):
        area = at // AREA
        if area < len(self.operands):
            self.touched[self.operands[area], kind] += range(at, at + size)

    def load(self, width):
        def load(at):
            self.note("read", at, 16 * width)
            return np.ones(16, np.float32)

        return load

    def store(self, width):
        return lambda at, x: self.note("write", at, 16 * width)

    def read_f32(self, at):
        self.note("read", at, 4)
        return np.float32(1)

    def decode(self, codes, row, n):
        self.note("read", codes, n)

    def encode(self, row, inverse, codes, n):
        self.note("write", codes, n)

    def stack(self, size):
        self.top += AREA
        return self.top

    def enter(self, home, spare, size, n, width, pad):
        if size == n:
            return home
        self.note("read", home, size * width)
        return spare

    def leave(self, home, at, size, width):
        if at != home:
            self.note("write", home, size * width)

    def take(self, tickets):
        """Of a job of one thread and one piece."""
        self.taken[tickets] = self.taken.get(tickets, -1) + 1
        return self.taken[tickets]

    def namespace(self, words):
        """Names of the primitives; `words` are those of a job at the address 0."""
        names = {
            "inner": lambda function: function, "inlined": lambda function: function,
            "read_i64": lambda at: words[at // 8], "read_f64": lambda at: 0.5,
            "cell_i64": lambda table, row, columns, column: int(table[row, column]),
            "cell_f64": lambda table, row, columns, column: 0.5,
            "set_cell_f64": lambda *_: None, "take": self.take, "number_of": None,
            "publish": lambda *_: None,
            "INFINITY": np.float32("inf"), "f32": np.float32, "abs": np.abs, "sign": np.sign,
            "sqrt": np.sqrt, "where": np.where, "maximum": np.maximum, "minimum": np.minimum,
            "finite": np.isfinite, "isfinite": math.isfinite, "only_finite": lambda x: x,
            "splat": lambda x: np.full(16, x),
            "rounded": np.multiply, "scaled": np.multiply, "fused": lambda x, y, z: x * y + z,
            "total": np.sum, "highest": np.max,
            "reach": lambda top, x: np.maximum(top, np.abs(x)),
            "reach_unsigned": np.maximum, "reach_above": np.maximum, "reach_below": np.minimum,
            "pinned": lambda x: x,
            "inverse_of": lambda row, largest, n: 1 / largest,
            "LEAST": 2.0**-28, "MOST": 2.0**28, "LARGEST": np.float32(3e38), "REACH": 1.007,
            "decode_s": self.decode, "decode_u": self.decode,
            "encode_s": self.encode, "encode_u": self.encode,
            "stack": self.stack, "enter": self.enter, "leave": self.leave,
            "read_f32": self.read_f32,
            "write_f32": lambda at, x: self.note("write", at, 4),
        }  # fmt: skip
        for kind, width in numba_source.SIZE.items():
            names[f"load_{kind}"], names[f"store_{kind}"] = self.load(width), self.store(width)
        return names


@lru_cache(maxsize=1)  # for every pass of a rule
def generated(rule, kind, bits):
    """The module that is generated, compiled without its imports, and the names these are of."""
    tree = ast.parse(numba_source.element_module(rule, kind, kind, FORMATS[OF_BITS[bits]]))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    tree.body = [node for node in tree.body if node not in imports]
    imported = {x.asname or x.name for node in imports for x in node.names} - {"*"}
    return compile(tree, rule.name, "exec"), imported


def touched(rule, name, kind, bits):
    """Addresses that pass `name` of the generated code reads and writes, by operand."""
    keys = [moment.key for moment in rule.moments]
    recorder = Recorder(["p", "g", "step", "residual", *keys, *(f"absmax_{key}" for key in keys)])
    columns = len(recorder.operands)
    address = np.arange(columns, dtype=np.int64)[None] * AREA
    geometry = np.array([[ROWS, ROW, BLOCKS // ROWS, ROWS * ROW, 0, 0, 0, 0]])
    chunks = np.array([[0, 0, BLOCKS]])
    names = recorder.namespace([0, 0, 1, 1, 1, address, geometry, chunks, 0, None, None])
    code, imported = generated(rule, kind, bits)
    assert imported <= set(names), "the recorder has every primitive"
    exec(code, names)
    with np.errstate(all="ignore"):
        names[f"{name}_share"](0)
    return recorder.touched


@pytest.mark.parametrize("rule", list(every_rule()))
@pytest.mark.parametrize(("kind", "bits"), [("f32", 8), ("bf16", 8), ("f32", 32)])
@pytest.mark.few("rule", "kind", "bits")
def test_each_pass_touches_what_is_counted(rule, kind, bits):
    exact = [moment.key for moment in rule.moments if moment.exact]
    for walk in traffic.passes(rule):
        seen = touched(rule, walk.name, kind, bits)
        for operation, wanted in (("read", walk.reads), ("write", walk.writes)):
            for name in ("p", "g", *(moment.key for moment in rule.moments)):
                coded = bits == 8 and name not in ("p", "g", *exact)
                width = WIDTH[kind] if name in "pg" else 1 if coded else 4
                addresses = seen[name, operation]
                assert len(addresses) == (width * ROWS * ROW if name in wanted else 0)
                assert len(set(addresses)) == len(addresses), "no byte twice in one pass"
                if not coded:
                    continue
                scales = set(seen[f"absmax_{name}", operation])
                assert len(scales) == (4 * BLOCKS if name in wanted else 0)


def test_bytes_of_whole_blocks():
    rule = adam.adam_rule(False, False, False)
    (update,) = traffic.passes(rule)
    assert update.moved(4, 8) == 4 + 4 + 4 + 4 * (1 + 4 / 256)
    assert update.moved(2, 8) == 2 + 2 + 2 + 4 * (1 + 4 / 256)
    assert update.moved(4, 32) == 28


@pytest.mark.parametrize(
    ("name", "total"),
    [("LARS8bit-paper", 22), ("LARS8bit-cap", 23), ("LAMB8bit", 26), ("LANS8bit", 34),
     ("Eve8bit", 20), ("Lion8bit", 14), ("AdEMAMix8bit", 18)],
)  # fmt: skip
def test_bytes_of_a_step(name, total):
    optimizer = registry.REGISTRY[name].make([torch.nn.Parameter(torch.zeros(1))], 0.1)
    rule = traffic.rule_of(optimizer)
    assert sum(walk.moved(4, 8) for walk in traffic.passes(rule)) == pytest.approx(total, abs=0.1)


def test_what_norms_read_again():
    def again(name):
        made = registry.REGISTRY[name].make([torch.nn.Parameter(torch.zeros(1))], 0.1)
        return traffic.extra_reads(made)

    assert again("torch.optim.AdamW") == again("AdamW8bit") == again("Cain8bit") == []
    assert again("LANS8bit") == ["param", "grad", "param", "grad", "state"]
    assert again("Eve8bit") == ["param"]


def test_the_page_has_the_table():
    (shown,) = re.findall(
        r"<!-- table:start -->\n\n(.*?)\n\n<!-- table:end -->", PAGE.read_text(), re.S
    )
    assert shown == traffic.table()
