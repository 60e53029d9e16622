"""Values that the generated tests give to settings: valid, odd, and such as have to be refused."""

import numpy as np
import torch

NAN, INF = float("nan"), float("inf")

VALID = {
    "lr": [0, 0.0, 1e-3, 0.01, torch.tensor(0.02), np.float64(0.01)],
    "weight_decay": [0, 0.0, 0.01, 0.1],
    "momentum": [0, 0.5, 0.9],
    "optim_bits": [4, 8, 32],
    "state_format": [None, "dynamic8", "ratio8", "ratio4", "float32"],
    "min_8bit_size": [0, 1, 200, 10**6],
    "dither": [True, False],
    "seed": [0, 3, 2**32 - 1],
    "master_weight_bits": [None, "auto", 16, 24, 32],
    "percentile_clipping": [0, 5, 50, 100],
    "maximize": [True, False],
    "amsgrad": [True, False],
    "eps": [1e-8, 1e-3],
    "max_unorm": [0.0, 0.02, 1.0],
}
BETAS = {2: [(0.9, 0.999), [0.5, 0.9], (0.0, 0.9)], 3: [(0.9, 0.999, 0.9999), (0.5, 0.9, 0.99)]}


def valid_for(group):
    """Values by the key of a setting, for one of this group's settings."""
    betas = {"betas": BETAS[len(group["betas"])]} if "betas" in group else {}
    return {key: values for key, values in {**VALID, **betas}.items() if key in group}


INVALID = {
    "lr": [NAN, INF, "0.1", None, torch.ones(2), 1j],
    "weight_decay": [NAN, "x", None, -1.0, [0.1]],
    "momentum": [NAN, "x", None, -1.0],
    "optim_bits": [5, "8", 16, None, 8.5],
    "state_format": ["adam", "8", 8],
    "dither": ["no", None, 2],
    "seed": [-1, 2**32, "x", None, 0.5],
    "master_weight_bits": [8, "x", 24.5, -1],
    "min_8bit_size": [-1, "x", None, 0.5],
    "percentile_clipping": [50.5, 101, -1, "5", None],
    "betas": [(0.9,), (NAN, 0.9), (1.5, 0.9), "ab", None, 0.9],
    "max_unorm": [NAN, -1.0, "x", None],
    "maximize": ["yes", None],
    "eps": [NAN, "x", None, -1.0],
}
ODD = {
    "lr": [-1e-8, np.float32(0.01), np.float64(-1e-20), torch.tensor([0.01]), np.ones(1)[0]],
    "weight_decay": [np.float32(0.01), torch.tensor(0.01), True],
    "momentum": [np.float32(0.9)],
    "betas": [(torch.tensor(0.9), torch.tensor(0.99)), (np.float32(0.9), np.float64(0.99))],
    "maximize": [1, 0, np.True_],
    "percentile_clipping": [50.0, np.int64(50)],
    "optim_bits": [8.0, np.int64(8)],
}
CONFIGS = [
    {"optim_bits": 32}, {"optim_bits": 8, "min_8bit_size": 0}, {"lr": 1e-3}, {"maximize": True},
    {"lr": torch.tensor(0.01)}, {"percentile_clipping": 50}, {"min_8bit_size": 10**6},
    {"state_format": "ratio8", "min_8bit_size": 0}, {"dither": False}, {"master_weight_bits": None},
]  # fmt: skip
BAD_WHEN_SAVED = {  # how state is stored is a matter of the optimizer that loads it
    "lr": [NAN, INF, "x", None, [0.1], 1j, torch.ones(2), torch.tensor(NAN), {}],
    "dither": ["no", None, 2],
    "seed": [-1, 2**32, "x", None, 0.5],
    "betas": [None, 0.9, (0.9,), (0.9, "x"), (NAN, 0.9), (1.5, 0.9), (0.9, -0.1), "ab", {}],
    "percentile_clipping": [-1, 101, 50.5, "5", None, True, NAN, [5]],
    "max_unorm": [-1.0, NAN, INF, "x", None],
    "maximize": ["yes", None, 2, [True]],
    "weight_decay": [-1.0, NAN, INF, "x", None, [0.1]],
    "momentum": [-1.0, NAN, INF, "x", None],
    "eps": [-1.0, NAN, INF, "x", None],
    "foreach": ["yes", 2],
    "capturable": ["yes", None],
    "differentiable": [True, "yes", None],
}
