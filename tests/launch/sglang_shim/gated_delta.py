"""Gated DeltaNet in plain PyTorch, in place of what SGLang (0.5.23) has for CPUs with AMX alone.

T tokens, D channels of a convolution of W taps, K key heads and H value heads of E and V numbers. A
slot of the server's tables keeps a convolution's last W - 1 columns, [D, W - 1], and a head's
memory, values by keys, [H, V, E]. Of arguments that are not named here the server gives none that
matter on a CPU.
"""

from __future__ import annotations

import torch  # ty: ignore[import-not-found]  (that of the servers)
from torch.nn.functional import silu, softplus  # ty: ignore[import-not-found]

_LENGTH_EPS = 1e-6


def convolved(x_TD, weight_DW, tail_DW):
    """Return SiLU of the causal convolution after a tail, which then is that of these tokens."""
    known_DT = torch.cat([tail_DW.to(x_TD.dtype), x_TD.T], dim=1)
    tail_DW.copy_(known_DT[:, -tail_DW.shape[1] :])
    return silu((known_DT.unfold(1, weight_DW.shape[1], 1) * weight_DW[:, None]).sum(-1)).T


def ran(q_TKE, k_TKE, v_THV, g_TH, beta_TH, memory_HVE):
    """Run the rule token by token; the memory is changed in place."""
    q, k = (
        (x * (x.square().sum(-1, keepdim=True) + _LENGTH_EPS).rsqrt()).repeat_interleave(
            v_THV.shape[1] // x.shape[1], dim=1
        )
        for x in (q_TKE.float(), k_TKE.float())
    )
    outputs = []
    for t in range(len(v_THV)):
        memory_HVE.mul_(g_TH[t].exp()[:, None, None])
        known_HV = (memory_HVE * k[t, :, None]).sum(-1)
        change_HV = beta_TH[t, :, None] * (v_THV[t].float() - known_HV)
        memory_HVE.add_(change_HV[:, :, None] * k[t, :, None])
        outputs.append((memory_HVE * q[t, :, None]).sum(-1) * q.shape[-1] ** -0.5)
    return torch.stack(outputs).to(v_THV.dtype)


def gates(a_log_H, a_TH, b_TH, dt_bias_H):
    """Return the log of what tokens leave of the memory, and how much of its error they mend."""
    g_TH = -a_log_H.float().exp() * softplus(a_TH.float() + dt_bias_H.float())
    return g_TH[None], b_TH.float().sigmoid()[None]


def convolve_rows(x_DT, weight, _bias, *, conv_states, has_initial_state, cache_indices,
                  query_start_loc, **_):  # fmt: skip
    starts, rows = query_start_loc.tolist(), []
    for row, slot in enumerate(cache_indices.tolist()):
        if not has_initial_state[row]:
            conv_states[slot].zero_()
        x_TD = x_DT[:, starts[row] : starts[row + 1]].T
        rows.append(convolved(x_TD, weight, conv_states[slot]))
    return torch.cat(rows).T


def convolve_tokens(x_BD, conv_states, weight, *_, conv_state_indices):
    slots = conv_state_indices.tolist()
    each = zip(x_BD[:, None], slots, strict=True)
    return torch.cat([convolved(x_TD, weight, conv_states[slot]) for x_TD, slot in each])


def run_rows(q, k, v, g, beta, initial_state, initial_state_indices, cu_seqlens, **_):
    starts, rows = cu_seqlens.tolist(), []
    for row, slot in enumerate(initial_state_indices.tolist()):
        own = slice(starts[row], starts[row + 1])
        rows.append(ran(*(x[0, own] for x in (q, k, v, g, beta)), initial_state[slot]))
    return torch.cat(rows)[None], None, None


def run_tokens(dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, cu_seqlens,
               **others):  # fmt: skip
    g, beta = gates(others["A_log"], a, b, dt_bias)
    return run_rows(q, k, v, g, beta, initial_state_source, initial_state_indices, cu_seqlens)[0]


def split_inputs(qkvz_TX, ba_TX, key_heads, heads, key_size, size):
    values = heads * size
    qkv, z = qkvz_TX.split([2 * key_heads * key_size + values, values], dim=-1)
    b, a = ba_TX.split([heads, heads], dim=-1)
    return qkv, z.reshape(len(z), heads, size), b, a


def normal(x, scale, eps):
    x = x.float()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * scale.float()


def queries_and_gates(q_gate, k, q_weight, k_weight, eps, size, heads):
    q, gate = q_gate.reshape(len(k), heads, 2, size).unbind(2)
    keys = normal(k.reshape(len(k), -1, size), 1 + k_weight.float(), eps)
    queries = normal(q, 1 + q_weight.float(), eps)
    return queries.to(k.dtype), keys.to(k.dtype), gate.contiguous()  # they are viewed flat


def normal_and_gated(self, x, z):
    return (normal(x, self.weight, self.eps) * silu(z.float())).to(x.dtype)


def unused(*_, **__):
    raise NotImplementedError


OPERATIONS = {
    "fused_gdn_gating_cpu": gates,
    "fused_sigmoid_gating_delta_rule_update_cpu": run_tokens,
    "fused_qkvzba_split_reshape_cat_contiguous_cpu": split_inputs,
    "fused_qk_gemma_rmsnorm_with_gate_cpu": queries_and_gates,
    "fused_qk_gemma_rmsnorm_cpu": unused,
    "fused_sigmoid_mul_cpu": lambda x, gate: x.mul_(gate.sigmoid()),
}
FUNCTIONS = {
    "causal_conv1d_fn_cpu": convolve_rows,
    "causal_conv1d_update_cpu": convolve_tokens,
    "chunk_gated_delta_rule_cpu": run_rows,
}
