"""The state dicts of an optimizer, and its copies and pickles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from .. import _masters
from . import _settings
from ._release import refusal
from ._state import Policy, portable, widened


class _Hidden:
    """Hides a state from torch's Optimizer.load_state_dict, which would cast its tensors."""

    def __init__(self, state: Any) -> None:
        self.state = state


def _hide_states(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A pre-hook of load_state_dict that hides every state from it."""
    return {**state_dict, "state": {k: _Hidden(v) for k, v in state_dict["state"].items()}}


class SavedOptimizer(torch.optim.Optimizer):
    """The params and settings of an optimizer, and what is saved of it and restored exactly."""

    _policy: Policy
    _index: dict[int, int]
    _policy_of: Callable[[dict[str, Any]], Policy]
    _moments: Callable[[dict[str, Any]], tuple[str, ...]]
    # Settings that a group of a torch state dict may lack.
    _optional: ClassVar[dict[str, Any]] = {"maximize": False}
    # The keys of a state to load, and whether each is required.
    _moment_names: tuple[str, ...]
    _moments_required = True
    # The options that a group may have for itself.
    _group_options: tuple[str, ...] = ("master_weights", "state_dtype", "stochastic_rounding")
    _release_gradients = False  # of optimizers that were pickled before this option
    # What a copy or a pickle has besides torch's.
    _KEPT: tuple[str, ...] = (
        *("_policy", "_seed", "_grad_dtype", "max_grad_norm", "max_grad_value", "ranks"),
        *("skipped", "_release_gradients"),
    )

    def _params(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _own_options(self, group: dict[str, Any]) -> dict[str, Any]:
        return {name: group[name] for name in self._group_options if name in group}

    def _check_settings(self, group: dict[str, Any], who: str) -> None:
        for name in self.defaults:
            if check := _settings.CHECKS.get(name):
                check(who, name, group[name])

    def _check_group(self, group: dict[str, Any], who: str) -> None:
        wanted = self.defaults.keys() - {"differentiable"}  # which torch adds to a copy
        if missing := sorted(wanted - group.keys()):
            raise ValueError(
                f"{who}: a param group must have {', '.join(missing)}: is this a checkpoint of "
                "another optimizer?"
            )
        options = self._own_options(group)
        # ZeroRedundancyOptimizer gives groups all that it was given.
        own = ((n, getattr(self, n, getattr(self, f"_{n}", self))) for n in group)
        same = {n for n, value in own if value is not self and value == group[n]}
        _settings.check_group(who, group.keys() - self.defaults.keys() - options.keys() - same)
        if options:
            _settings.Options.parse(who, {**self._policy.options(), **options})
        self._check_settings(group, who)
        _settings.check_norm(who, group.get("max_grad_norm"), self._release_gradients)

    def _check_params(self, params: list[torch.Tensor], who: str) -> None:
        if reason := refusal(self, params):
            raise ValueError(f"{who}: {reason}")

    def _moments_of(self, saved: dict[str, Any]) -> tuple[str, ...]:
        """The moments that a state to load may hold."""
        return self._moment_names

    def state_dict(self) -> dict[str, Any]:
        """The state of all params and the settings of all groups, as torch.optim has them.

        Moments in 8 bits are uint8 codes, `<moment>_codes`, with their scales. Where
        torch.distributed is initialized they are bf16, which holds their values exactly: another
        number of ranks, whose blocks end elsewhere, can load them and rounds them once more.
        """
        return self._converted(portable)

    def fp32_state_dict(self) -> dict[str, Any]:
        """`state_dict()` with moments in 8 or 16 bits converted to FP32, without loss."""
        return self._converted(widened)

    def _converted(self, convert: Any) -> dict[str, Any]:
        """torch's state dict with each param's state converted; other keys are the user's own."""
        result = super().state_dict()
        states = {**result["state"]}
        indices = [index for group in result["param_groups"] for index in group["params"]]
        current = self._current_states()
        for p, index in zip(self._params(), indices, strict=True):
            if (state := current.get(p, states.get(index))) is not None:
                states[index] = convert(state, self._moments_of(state))
        return {**result, "state": states}

    def _current_states(self) -> dict[torch.Tensor, dict[str, Any]]:
        """The states to save where masters are not, or no longer, those in `state`: before the
        first step, and after FP32 weights were loaded. Nothing is changed."""
        states: dict[torch.Tensor, dict[str, Any]] = {}
        _masters.attach()
        for group in self.param_groups:
            policy, moments = self._policy_of(group), self._moments(group)
            for p in group["params"]:
                form, state = policy.master(p), self.state.get(p)
                record = _masters.known(p) if form and (state or p.requires_grad) else None
                if record is None or form is None or not (record or state):
                    continue
                if state is None or form not in state or record.get(form) is not state[form]:
                    kept = {k: v for k, v in (state or {}).items() if k not in _masters.FORMS}
                    states[p] = {**kept, form: _masters.in_form(p, form, policy.remainder)}
                    if state is None:
                        policy.create(p, states[p], moments)
        return states

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, or of the class of the same name in torch.optim.

        Tensors are copied and keep their dtypes (torch.optim casts them to the params'). The
        model's weights may be loaded before or after. Raises ValueError, changing nothing, for a
        state that does not fit: another number of params, another shape, dtype or optimizer, or
        masters that these options do not use. State under keys of your own, which are no params
        (`optimizer.state["x"] = 1`), is saved and loaded as it is.

        Where the state has no master, that of the param stays; a param in FP32 takes from a saved
        master the bits that it lacks. `master_weights`, `state_dtype` and `stochastic_rounding` are
        this optimizer's, not those in the state dict.
        """
        _settings.check_state_dict(f"{type(self).__name__}.load_state_dict", state_dict)
        hook = self.register_load_state_dict_pre_hook(_hide_states)  # runs after all others
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()

    def _restore(
        self, who: str, p: torch.Tensor, saved: dict[str, Any], group: dict[str, Any]
    ) -> dict[str, Any]:
        """The loaded state of a param of a loaded group, checked and copied."""
        moments = self._moments_of(saved)
        required = moments if self._moments_required else ()
        return self._policy_of(group).restore(who, p, saved, moments, required)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state["state"] = defaultdict(dict, {**self.state, **self._current_states()})
        return {**state, **{name: getattr(self, name) for name in self._KEPT}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by unpickling and copying, and by load_state_dict with its dict's two keys."""
        loading = "_policy" not in state
        who = type(self).__name__ + (".load_state_dict" if loading else "")
        if loading:
            state = {"state": self.state, "param_groups": self.param_groups, **state}
            for group, current in zip(state["param_groups"], self.param_groups, strict=False):
                for name in self._group_options:
                    group.pop(name, None)
                group.update(self._own_options(current))
        else:
            self.defaults, self._policy = state["defaults"], state["_policy"]
        states: defaultdict[Any, Any] = defaultdict(dict)
        for key, kept in state["state"].items():
            states[key] = kept.state if isinstance(kept, _Hidden) else kept
        for group in state["param_groups"]:
            group.update({**self._optional, **group})
            self._check_group(group, who)
            if not loading:
                self._check_params(group["params"], who)
            for p in group["params"] if loading else ():
                try:
                    if saved := states.get(p):  # an empty one stays
                        states[p] = self._restore(who, p, saved, group)
                except ValueError as error:
                    names = zip(group["params"], group.get("param_names", ()), strict=False)
                    name = next((n for q, n in names if q is p), str(self._index[id(p)]))
                    raise ValueError(f"{error} (it is the state of param {name})") from None
        super().__setstate__({**state, "state": states} if loading else state)
        self._forget()
        _masters.attach()
        marks = {"fresh": True} if loading else {}
        for group in self.param_groups:  # loaded or copied masters are those of their params
            policy = self._policy_of(group)
            for p in group["params"]:
                kept = self.state.get(p, {})
                for form in _masters.FORMS:
                    if form in kept:
                        values = kept[form] if policy.master(p) else kept.pop(form)
                        _masters.put(p, form, values, optimizer=policy.number, **marks)
        self._set_up_params()

    def _forget(self) -> None:
        raise NotImplementedError

    def _set_up_params(self) -> None:
        raise NotImplementedError
