"""Every optimizer that a benchmark is about, one row each, and what the programs make of a row.

A row says how to build the optimizer, its learning rates, what it is timed beside, and which
programs take it where they take only a few.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from benchmarks.common.arguments import known

Factory = Callable[[Iterable[torch.nn.Parameter], float], torch.optim.Optimizer]


@dataclass(frozen=True)
class Source:
    """A factory, `(params, lr) -> optimizer`, that imports its module when it is called.

    Attributes:
        module, cls: where the class is.
        options: of the constructor, besides `lr`.
        preset: of the module's `LARS_PRESETS` the one that the options complete, or None.
    """

    module: str
    cls: str
    options: Mapping[str, object] = field(default_factory=dict)
    preset: str | None = None

    @property
    def library(self) -> str:
        """The package that has to be installed."""
        return self.module.partition(".")[0]

    @property
    def name(self) -> str:
        """Another library's class as a table shows it: "torchao.AdamW8bit", "torch.optim.SGD"."""
        return f"{self.module if self.library == 'torch' else self.library}.{self.cls}"

    def __call__(self, params: Iterable[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
        module = importlib.import_module(self.module)
        preset = module.LARS_PRESETS[self.preset] if self.preset else {}
        return getattr(module, self.cls)(params, lr=lr, **preset, **self.options)


@dataclass(frozen=True)
class Form:
    """A further way to store the state or the weights of a row's optimizer.

    Attributes:
        suffix: what follows the class in its entry's name: "8bit-ratio8".
        bits: of the class that is built, `X4bit`, `X8bit` or `X32bit`.
        options: of the constructor, besides the row's.
        dtype: of the weights, and of activations where `models.arithmetic` is in it.
    """

    suffix: str
    bits: int
    options: Mapping[str, object] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32

    @property
    def state_format(self) -> str | None:
        """The format of the state, unless it is what 8 bits mean."""
        given = self.options.get("state_format")
        return "ratio4" if self.bits == 4 else None if given is None else str(given)


@dataclass(frozen=True)
class Row:
    """One optimizer of this package, or one variant of it, in 32 and in 8 bits.

    Attributes:
        name: the class without its bits, and the variant after a dash: "LARS-cap".
        lr: peak learning rate by task name; None if static programs alone are about it.
        options: of the constructor, besides `lr`.
        preset: of `LARS_PRESETS` the one that the options complete, or None.
        beside: class of torch.optim that its step is timed beside on CPUs, or None.
        aim: largest ratio to the fused form of `beside` that is aimed at with 8 bits, for 16.8 M
            fp32 parameters and two threads; `speed` times the rows that have one. Or None.
        sign: it steps by a sign, which the rounding of a momentum near zero turns around.
        cpu_peers: other libraries' 8-bit forms that run on CPUs.
        gpu_peers: other libraries' that it is timed beside on GPUs; None if it is not timed there.
        gpu_options: what replaces options there, as its peers have it.
        weighed: further optimizers of other libraries whose memory `footprint` sets beside it.
        default_of: programs that take few optimizers unless told which, and take this: the tasks of
            `compare`, "first step" and "32-bit step" of `speed.cpu`, "kinds".
        four: whether it comes in 4 bits.
        forms: further ways to store it, which `compare` trains along with it.
    """

    name: str
    lr: Mapping[str, float] | None
    options: Mapping[str, object] = field(default_factory=dict)
    preset: str | None = None
    beside: str | None = None
    aim: float | None = None
    sign: bool = False
    cpu_peers: tuple[Source, ...] = ()
    gpu_peers: tuple[Source, ...] | None = None
    gpu_options: Mapping[str, object] = field(default_factory=dict)
    weighed: tuple[Source, ...] = ()
    default_of: tuple[str, ...] = ()
    four: bool = False
    forms: tuple[Form, ...] = ()

    @property
    def cls(self) -> str:
        """The class without its bits."""
        return self.name.partition("-")[0]

    def entry_name(self, bits: str) -> str:
        """Its entry's name, "LARS8bit-cap" for "8bit"; a preset is named as a variant is."""
        variant = self.name.partition("-")[2] or self.preset
        return f"{self.cls}{bits}" + (f"-{variant}" if variant else "")

    def form_name(self, form: Form) -> str:
        """The name of a form's entry, "AdamW8bit-ratio8"."""
        bits, dash, rest = form.suffix.partition("-")
        return self.entry_name(bits) + dash + rest

    def source(self, bits: int, **options: object) -> Source:
        """Its factory in these bits."""
        given = {**self.options, **options}
        return Source("lowbit_optim", f"{self.cls}{bits}bit", given, self.preset)

    def of_torch(self) -> dict[str, Source]:
        """Torch's class of its name by form, "", "fused" and "foreach", if it is `beside`."""
        forms = ("", "fused", "foreach") if self.beside == self.name else ()
        return {
            form: Source(
                "torch.optim", self.name, {**self.options, **({form: True} if form else {})}
            )
            for form in forms
        }

    def peers(self) -> Iterator[Entry]:
        """An entry for each optimizer of another library that is named with it."""
        for source in (*self.cpu_peers, *(self.gpu_peers or ()), *self.weighed):
            yield Entry(source.name, source, self.lr or {}, sign=self.sign, peer=source.library)


@dataclass(frozen=True)
class Entry:
    """One optimizer in one number of bits, torch's or another library's.

    Attributes:
        name: what `--optimizer` takes.
        make: `(params, lr) -> optimizer`.
        lr: peak learning rate by task name; `DEFAULT_LR` where a task is not named.
        twin: name of the 32-bit entry whose held-out quality an 8-bit one has to match, or None.
        fused: name of the torch entry that `speed.cpu` times it beside, or None.
        foreach: likewise where the host's overhead is what counts, or None.
        aim: largest ratio to `fused` that is aimed at, or None.
        sign: as its row's.
        peer: module of another library that has to be importable, or None.
        form: a further way to store what another entry of this package has, or None.
    """

    name: str
    make: Factory
    lr: Mapping[str, float] = field(default_factory=dict)
    twin: str | None = None
    fused: str | None = None
    foreach: str | None = None
    aim: float | None = None
    sign: bool = False
    peer: str | None = None
    form: Form | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights."""
        return torch.float32 if self.form is None else self.form.dtype

    @property
    def state_format(self) -> str | None:
        """The format that its name gives; None where it is what its bits mean."""
        return None if self.form is None else self.form.state_format

    def learning_rate(self, task: str) -> float:
        """The tuned peak learning rate for a task."""
        return self.lr.get(task, DEFAULT_LR)

    def available(self) -> bool:
        """Whether the module that the entry needs is installed."""
        return self.peer is None or importlib.util.find_spec(self.peer) is not None


DEFAULT_LR = 1e-3
# The rates for digits, and those of LAMB to Cain for the other tasks, are what `tune` chose of 1
# and 3 times powers of ten, by the 32-bit optimizers alone on seeds from 100 on (three for digits,
# two for mnist, one for gpt), which are in no comparison: the best mean quality among the rates
# whose next larger one still trains. ScheduleFreeAdamW's is tuned for digits alone.
ADAM_LR = {"gpt": 2e-3, "mnist": 2e-3, "digits": 3e-3}
LAMB_LR = {"gpt": 1e-2, "mnist": 1e-2, "digits": 1e-2}
CAIN_LR = {"gpt": 1e-2, "mnist": 3e-2, "digits": 3e-2}  # for gpt customary, not tuned
MOMENTUM = {"momentum": 0.9, "weight_decay": 5e-4}
BF16 = torch.bfloat16
RATIO8, RATIO4 = Form("8bit-ratio8", 8, {"state_format": "ratio8"}), Form("4bit", 4)
STORED = (
    RATIO8,
    RATIO4,
    Form("8bit-bf16", 8, {"master_weight_bits": "auto"}, BF16),
    Form("8bit-bf16-nearest", 8, {"master_weight_bits": None}, BF16),
)
DECAY, NO_DECAY = {"weight_decay": 0.01}, {"weight_decay": 0.0}
ADAMW_PEERS = (Source("bitsandbytes.optim", "AdamW8bit"), Source("torchao.optim", "AdamW8bit"))
ADAMW_WEIGHED = (
    Source("bitsandbytes.optim", "AdamW32bit"), Source("torchao.optim", "AdamW4bit"),
    Source("torchao.optim", "AdamWFp8"), Source("optimi", "AdamW"),
)  # fmt: skip
SGD_PEERS = (
    Source("bitsandbytes.optim", "SGD8bit", MOMENTUM), Source("flashoptim", "FlashSGD", MOMENTUM),
)  # fmt: skip

ROWS = (
    Row("AdamW", ADAM_LR, beside="AdamW", aim=1.0, cpu_peers=ADAMW_PEERS,
        gpu_peers=(*ADAMW_PEERS, Source("flashoptim", "FlashAdamW")),
        weighed=ADAMW_WEIGHED, forms=STORED, four=True,
        default_of=("gpt", "digits", "first step", "32-bit step", "kinds")),
    Row("AdamW-amsgrad", None, {"amsgrad": True}),
    Row("Adam", ADAM_LR, beside="Adam", four=True),
    Row("SGD", {"gpt": 0.2, "mnist": 0.1, "digits": 0.1}, MOMENTUM, beside="SGD", aim=1.3,
        gpu_peers=SGD_PEERS, weighed=(Source("optimi", "SGD", MOMENTUM),),
        default_of=("kinds",)),
    Row("LARS", {"gpt": 10.0, "mnist": 20.0, "digits": 3.0}, MOMENTUM, "paper",
        beside="SGD", aim=2.0,
        gpu_peers=(Source("bitsandbytes.optim", "LARS8bit", MOMENTUM),),
        default_of=("mnist", "digits", "first step", "kinds")),
    Row("LARS-cap", {"gpt": 1.0, "mnist": 1.0, "digits": 0.3}, {"max_unorm": 0.02, **MOMENTUM},
        beside="SGD", aim=2.0, default_of=("mnist", "digits")),
    Row("LAMB", LAMB_LR, {"trust_coefficient": 1.0, **DECAY}, beside="AdamW", aim=3.0,
        gpu_peers=(Source("bitsandbytes.optim", "LAMB8bit"),), gpu_options=NO_DECAY,
        default_of=("kinds",), four=True),
    Row("LANS", LAMB_LR, DECAY, beside="AdamW", aim=4.0, gpu_peers=(), gpu_options=NO_DECAY,
        default_of=("kinds",), four=True),
    # SGD with momentum moves fewer bytes than AdamW: the stricter baseline, whose aim implies that
    # of twice fused AdamW.
    Row("Lion", {"gpt": 1e-3, "mnist": 1e-3, "digits": 1e-3}, DECAY, beside="SGD", aim=1.5,
        sign=True, gpu_options=NO_DECAY,
        gpu_peers=(Source("bitsandbytes.optim", "Lion8bit"), Source("flashoptim", "FlashLion")),
        weighed=(Source("optimi", "Lion"),)),
    Row("RMSprop", {"gpt": 1e-3, "mnist": 3e-3, "digits": 3e-3}, beside="AdamW", aim=2.0,
        weighed=(Source("torch.optim", "RMSprop"), Source("bitsandbytes.optim", "RMSprop8bit"))),
    Row("Adagrad", {"gpt": 1e-2, "mnist": 3e-2, "digits": 3e-2}, beside="AdamW", aim=2.0,
        weighed=(Source("torch.optim", "Adagrad"), Source("bitsandbytes.optim", "Adagrad8bit"))),
    Row("ADOPT", ADAM_LR, beside="AdamW"),
    Row("ScheduleFreeAdamW", {"digits": 1e-2}),
    Row("AdEMAMix", ADAM_LR, beside="AdamW", aim=3.0,
        weighed=(Source("bitsandbytes.optim", "AdEMAMix8bit"),)),
    Row("Eve", ADAM_LR, beside="AdamW", aim=3.0, four=True),
    Row("Cain", CAIN_LR),
    Row("LearnedGradient", CAIN_LR, {"max_size": 512}),
)  # fmt: skip


def _entries() -> Iterator[Entry]:
    """Torch's three forms of a class that its own row stands beside, this package's, the peers'.

    Of this package's first the two that every optimizer has, then the further formats.
    """
    trained = [row for row in ROWS if row.lr is not None]
    for row in trained:
        for form, source in row.of_torch().items():
            yield Entry(source.name + (f"-{form}" if form else ""), source, row.lr)
    for row in trained:
        for bits, twin, aim in ((32, None, None), (8, row.entry_name("32bit"), row.aim)):
            yield Entry(row.entry_name(f"{bits}bit"), row.source(bits), row.lr, twin,
                        **_speed(row), aim=aim, sign=row.sign)  # fmt: skip
    for row in trained:
        formats = (RATIO8, *((RATIO4,) if row.four else ()))
        for form in (*row.forms, *(one for one in formats if one not in row.forms)):
            yield Entry(row.form_name(form), row.source(form.bits, **form.options), row.lr,
                        row.entry_name("32bit"), **_speed(row), sign=row.sign,
                        form=form)  # fmt: skip
    for row in trained:
        for source in row.cpu_peers:
            # Without a 32-bit twin on the CPU; torch's class is its judge.
            yield Entry(source.name, source, row.lr,
                        f"torch.optim.{row.name}", **_speed(row), peer=source.library)  # fmt: skip


def _speed(row: Row) -> dict[str, str]:
    forms = ("fused", "foreach") if row.beside else ()
    return {form: f"torch.optim.{row.beside}-{form}" for form in forms}


REGISTRY: dict[str, Entry] = {entry.name: entry for entry in _entries()}


def weighed() -> dict[str, Entry]:
    """Entries that `footprint` weighs, by name: all but those of bf16 weights, and all peers."""
    entries = [entry for entry in REGISTRY.values() if entry.dtype == torch.float32]
    peers = (peer for row in ROWS for peer in row.peers() if peer.name not in REGISTRY)
    return {entry.name: entry for entry in (*entries, *peers)}


def aimed() -> list[str]:
    """The names of the entries whose step has an aim."""
    return [entry.name for entry in REGISTRY.values() if entry.aim is not None]


def default_of(program: str) -> list[Row]:
    """The rows that a program takes unless told which."""
    return [row for row in ROWS if program in row.default_of]


def select(names: Iterable[str], entries: Mapping[str, Entry] | None = None) -> list[Entry]:
    """The entries of these names, in this order, each once; those of the registry unless given.

    Raises:
        ValueError: a name is not in the registry, or its library is not installed.
    """
    chosen, entries = {}, REGISTRY if entries is None else entries
    for name in known("optimizer", names, entries):
        entry = entries[name]
        if not entry.available():
            raise ValueError(f"optimizer {name!r} needs {entry.peer}, which is not installed")
        chosen[name] = entry
    return list(chosen.values())


def of_dtypes(entries: Iterable[Entry], *dtypes: torch.dtype) -> None:
    """Hold the weights that entries are of against those that a program steps.

    An entry whose name says nothing of them is of any.

    Raises:
        ValueError: one is of weights in another dtype.
    """
    for entry in entries:
        if entry.dtype != torch.float32 and {entry.dtype} != {*dtypes}:
            own, *given = (str(one).removeprefix("torch.") for one in (entry.dtype, *dtypes))
            raise ValueError(f"{entry.name!r} is of {own} weights, not of {', '.join(given)}")
