"""MultiheadAttention: torch.nn.MultiheadAttention with a recipe for its projections."""

from __future__ import annotations

import torch
from torch.nn import functional as torch_functional
from torch.nn.functional import dropout, pad, scaled_dot_product_attention

from .. import functional
from ..functional._tensor_parallel import refuse_parts
from ..ops._dispatch import checks
from ..recipes import Recipe
from ._layer import Layer
from .autocast import recipe_here

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class MultiheadAttention(Layer, torch.nn.MultiheadAttention):
    """torch.nn.MultiheadAttention whose projections of query, key and value use `recipe`.

    Only `mixprec.convert` makes it. `out_proj` is a layer of its own, whose hooks are called;
    softmax(q k^T / sqrt(D)) v is computed as in torch, in the dtype of the projections, and never
    by torch's fast path, which reads the weights instead. Delayed scales are shared by the
    projections.
    """

    __module__ = "mixprec.nn"
    _one_product = False

    @property
    def _first_weight(self) -> torch.Tensor:
        packed: torch.Tensor | None = self.in_proj_weight
        return self.q_proj_weight if packed is None else packed

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """query [B, L, E], key [B, S, K], value [B, S, V]; [L, B, E], ... without batch_first; or
        without B. Masks, results and errors as in torch."""
        recipe = recipe_here(self._recipe)
        if recipe is None:
            self._watch_main_grads()
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask,
                average_attn_weights, is_causal,
            )  # fmt: skip
        checks.is_tensor("MultiheadAttention", "query", query)
        refuse_parts("MultiheadAttention", query, self.in_proj_weight, self.q_proj_weight)
        check = torch_functional._mha_shape_check  # type: ignore[attr-defined]
        batched = check(query, key, value, key_padding_mask, attn_mask, self.num_heads)
        if is_causal and attn_mask is None:
            raise RuntimeError("MultiheadAttention: is_causal is a hint and needs attn_mask too")
        swap = batched and not self.batch_first
        if not batched and key_padding_mask is not None:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        q, k, v = self._heads(recipe, query, key, value, batched, swap)
        p = self.dropout if self.training else 0.0
        keys = key.shape[1 if batched and not swap else 0]
        causal = is_causal and key_padding_mask is None and not need_weights and k.shape[2] == keys
        mask = None if causal else _mask(attn_mask, key_padding_mask, q, k, keys)
        weights = None
        if need_weights:
            scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = dropout(weights, p) if p > 0 else weights
            y = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        else:
            y = scaled_dot_product_attention(q, k, v, mask, p, causal)
        y = self.out_proj(y.transpose(1, 2).flatten(2))
        return (y.transpose(0, 1) if swap else y if batched else y.squeeze(0)), weights

    def _heads(
        self,
        recipe: Recipe,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batched: bool,
        swap: bool,
    ) -> Heads:
        """q [B, H, L, D], k and v [B, H, S', D], with the keys that the module itself adds."""

        def project(
            x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
        ) -> torch.Tensor:
            state = self._state(x.dtype, x.device, recipe)._asdict()
            y = functional.linear(x, weight, bias, recipe=recipe, name=self._label, **state)
            return y.transpose(0, 1) if swap else y if batched else y.unsqueeze(0)

        w, b, e = self.in_proj_weight, self.in_proj_bias, self.embed_dim
        if w is not None and query is key and key is value:
            q, k, v = project(query, w, b).chunk(3, -1)
        elif w is not None and key is value:
            q = project(query, w[:e], None if b is None else b[:e])
            k, v = project(key, w[e:], None if b is None else b[e:]).chunk(2, -1)
        else:
            separate = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
            weights = separate if w is None else w.chunk(3)
            biases = (None,) * 3 if b is None else b.chunk(3)
            inputs = zip((query, key, value), weights, biases, strict=True)
            q, k, v = (project(*one) for one in inputs)
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (
                torch.cat([x, bias.to(x.dtype).expand(x.shape[0], 1, -1)], 1)
                for x, bias in ((k, self.bias_k), (v, self.bias_v))
            )
        if self.add_zero_attn:
            k, v = pad(k, (0, 0, 0, 1)), pad(v, (0, 0, 0, 1))
        heads = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        q, k, v = heads
        return q, k, v

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, heads={self.num_heads}, {self.recipe}"


def _mask(
    attn_mask: torch.Tensor | None,
    key_padding_mask: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    keys: int,
) -> torch.Tensor | None:
    """What is added to the scores [B, H, L, S']; True in a mask means -inf. keys: S."""
    total, (b, h, rows, _) = None, q.shape
    if attn_mask is not None:
        per_head = attn_mask.dim() == 3
        _has_shape("attn_mask", attn_mask, (b * h, rows, keys) if per_head else (rows, keys))
        total = _added(attn_mask.unflatten(0, (b, h)) if per_head else attn_mask, q, k)
    if key_padding_mask is not None:
        _has_shape("key_padding_mask", key_padding_mask, (b, keys))
        padding = _added(key_padding_mask[:, None, None], q, k)
        total = padding if total is None else total + padding
    return total


def _has_shape(name: str, mask: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(mask.shape) != shape:
        got = tuple(mask.shape)
        raise RuntimeError(f"MultiheadAttention: {name} must have shape {shape}, got {got}")


def _added(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """`mask` as a summand, 0 for the keys that the module itself adds."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, -torch.inf)
    return pad(mask.to(q.dtype), (0, k.shape[2] - mask.shape[-1]))
