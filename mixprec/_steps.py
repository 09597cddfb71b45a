"""What runs before and after each step of any optimizer, of torch too: each function once."""

from __future__ import annotations

import functools

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

before_steps = functools.cache(register_optimizer_step_pre_hook)
after_steps = functools.cache(register_optimizer_step_post_hook)
