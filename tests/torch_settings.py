"""Settings of torch and of runtime/checkpoint.py in each process that runs tests.

conftest.py imports it before the first test module.
"""

import os

import torch

from runtime import checkpoint

# Matrices are tiny here: a second thread makes them slower, up to 100 times where cores are shared.
torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Triton reads it when a kernel is defined
    os.environ["TRITON_INTERPRET"] = "1"
# Every run waits for its last save: polls of 50 ms would add up to half a minute.
checkpoint.POLL_SECONDS = 0.002
