"""Rows of the benchmarks: what is stepped, loaded and counted is what their names say."""

import torch

from benchmarks.common import registry
from benchmarks.quality import compare_worker


def test_the_engine_is_loaded_for_the_weights_that_are_trained(monkeypatch):
    entry, seen = registry.REGISTRY["AdamW8bit-bf16"], []
    make = type(entry.make).__call__

    def noted(source, params, lr):
        seen.extend(p.dtype for p in params)
        return make(source, params, lr)

    monkeypatch.setattr(type(entry.make), "__call__", noted)
    compare_worker.load_engine(entry, torch.device("cpu"))
    assert set(seen) == {torch.bfloat16}
