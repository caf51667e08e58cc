"""What an attention kernel that no interpreter runs is asked before it is used: a small call, exactly."""

import math

import pytest
import torch

from kernels.attention import attention_launch as attention
from kernels.attention.attention_exactness import check_attention
from kernels.linear.exactness import WrongResult

CPU = torch.device("cpu")


def attend(operands, out):
    """`check_attention`'s operands in float64."""
    q, q_scale, k, k_scale, v, v_scale = operands
    tokens, group = v.shape[2], len(q) // len(k)
    share = k.shape[1] // k_scale.shape[1]
    windows = k_scale.view(len(k), -1, 1, 4, 1).expand(-1, -1, share // 2, -1, 2) if share > 1 else k_scale
    k_scale = windows.reshape(len(k), -1)
    k, k_scale, v = (x.repeat_interleave(group, 0) for x in (k[:, :tokens], k_scale[:, :tokens], v[0]))
    logits = q.double() @ k.double().mT * q_scale.double()[:, :, None] * k_scale.double()[:, None]
    result = torch.softmax(logits * math.log(2), -1) @ v.double()
    out.copy_(result if v_scale is None else result * v_scale.repeat_interleave(group, 0)[:, None])


def losing_the_last_keys(operands, out):
    attend(operands._replace(v=operands.v[:, :, :-13]), out)


def rows_out_of_place(operands, out):
    attend(operands._replace(v=operands.v.roll(8, 2)), out)


def other_heads(operands, out):
    attend(operands._replace(k=operands.k.flip(0)), out)


def scales_of_other_keys(operands, out):
    attend(operands._replace(k_scale=operands.k_scale.roll(1, 1)), out)


def without_v_scale(operands, out):
    attend(operands._replace(v_scale=None), out)


CHANNELS = (64, 128, 256)


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("share", (1, 8, 16))
@pytest.mark.parametrize("scaled, dtype", ((True, torch.float16), (False, torch.bfloat16)))
def test_exact_attention_passes(channels, share, scaled, dtype):
    check_attention(attend, channels, share, scaled, dtype, CPU)


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("share", (1, 8, 16))
@pytest.mark.parametrize(
    "wrong", (losing_the_last_keys, rows_out_of_place, other_heads, scales_of_other_keys, without_v_scale)
)
def test_wrong_attention_is_seen(wrong, share, channels):
    with pytest.raises(WrongResult):
        check_attention(wrong, channels, share, True, torch.float16, CPU)


def test_attention_is_asked_once_and_told_of_once(monkeypatch, caplog, nothing_kept):
    calls = []

    def check(*form):
        calls.append(form)
        raise WrongResult

    monkeypatch.setattr(attention, "check_attention", check)
    monkeypatch.setattr(attention, "device_name", lambda index: "a card")
    for _ in range(2):
        assert not attention._is_right(attention.tiles_for((8, 6), 64), True, True, 64, torch.float16, CPU)
    assert len(calls) == len(caplog.records) == 1 and "not used there" in caplog.text
