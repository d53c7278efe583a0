"""Faults around us: each is seen with its mend switched off, so that a mend no longer needed is noticed, and gone with it on.

device/patches.py holds the table. Those of attention are in test_attention.py; those of FSDP2, which no engine uses yet, in
test_fsdp2.py.
"""

import os

import counted
import pytest
import rotary_forms
import simulator
import torch
import torch.distributed as dist
from diffusers.models import activations, embeddings, normalization
from support.engines import COUNTS, built, config
from support.sdxl import source
from torch import nn

from difftrain.config.schema.sections import TrainingSection
from difftrain.device import choose, counters, fused_layers, patches
from difftrain.engine import ddp, update
from difftrain.models.vae.latents import posterior
from difftrain.testing.family import tiny_step
from difftrain.testing.spawn import free_port

NPU = "npu:0"


@pytest.fixture(autouse=True)
def mended():
    choose("npu")
    patches.apply("diffusers")


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_every_row_is_here_or_named_elsewhere():
    here = {"geglu", "rms_norm", "rotary", "fused_adamw", "npu_fused_adamw", "ddp_strides"}
    here |= {f"complex_rotary_of_{forms}" for forms in ("text_and_image", "one_stream", "grouped_heads")}
    here |= {"routed_experts"}
    # test_attention.py; test/unit/device/test_frame_attention.py
    elsewhere = {"native_npu", "causal_frames"}
    assert {row.name for row in patches.PATCHES} == here | elsewhere


# ------------------------------------------------------------------ diffusers


def test_geglu_of_diffusers_crashes_on_the_cpu_and_is_no_exact_gelu():
    layer, x = activations.GEGLU(8, 64), 3 * drawn(16, 8)
    exact = layer(x)
    with patches.without("geglu"):
        with pytest.raises(RuntimeError, match="npu_geglu"):
            layer(x)
        theirs = layer.to(NPU)(x.to(NPU)).cpu()
    ours = layer(x.to(NPU)).cpu()
    assert (theirs - exact).abs().max() > 1e-4
    torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5)


def test_rms_norm_of_diffusers_crashes_on_the_cpu_and_with_two_dtypes():
    norm, x = normalization.RMSNorm(8, eps=1e-6), drawn(4, 8)
    with patches.without("rms_norm"):
        with pytest.raises(RuntimeError, match="npu_rms_norm"):
            norm(x)
        norm.to(NPU)
        with pytest.raises(RuntimeError, match="npu_rms_norm"):
            norm(x.to(NPU).bfloat16())
    assert norm(x.to(NPU).bfloat16()).dtype == torch.float32


def test_rotary_embeddings_of_diffusers_are_not_fused():
    x, angles = drawn(1, 2, 5, 16).to(NPU), drawn(5, 16).to(NPU)
    tables = angles.cos(), angles.sin()
    with patches.without("rotary"), simulator.counting() as ran:
        theirs = embeddings.apply_rotary_emb(x, tables)
    assert not ran["npu::npu_rotary_mul"]
    with simulator.counting() as ran:
        ours = embeddings.apply_rotary_emb(x, tables)
    assert ran["npu::npu_rotary_mul"] == 1
    torch.testing.assert_close(ours.cpu(), theirs.cpu(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", rotary_forms.FORMS)
def test_complex_tables_of_diffusers_are_complex_on_the_device_too_and_real_ones_are_fused(name):
    form = rotary_forms.FORMS[name]
    x, freqs = drawn(2, 5, 3, 16), rotary_forms.complex_tables(2, 5, 16)[form.where]
    tables = tuple(each.to(NPU) for each in fused_layers.real_tables(freqs))
    with patches.without(form.patch):
        with pytest.raises((AttributeError, TypeError)):
            form.rotate(x.to(NPU), tables)
        with counted.DtypeCount("npu") as seen:
            theirs = form.rotate(x.to(NPU), freqs.to(NPU)).cpu()
    assert torch.complex64 in seen.dtypes
    patches.apply("diffusers")
    with counted.DtypeCount("npu") as seen, simulator.counting() as ran:
        ours = form.rotate(x.to(NPU), tables).cpu()
    assert seen.dtypes == {torch.float32} and ran["npu::npu_rotary_mul"] == form.calls
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_tables_of_grouped_heads_are_complex_of_twice_fp64_and_rotate_as_real_ones():
    from diffusers.models.transformers import transformer_lumina2

    def rotated(device):
        (table,) = transformer_lumina2.Lumina2RotaryPosEmbed(10000, [16], [5]).freqs_cis
        out = transformer_lumina2.apply_rotary_emb(x.to(device), table[None].to(device), use_real=False)
        return table.dtype, out.cpu()

    x = drawn(1, 5, 3, 16)
    with patches.without("complex_rotary_of_grouped_heads"):
        dtype, theirs = rotated("cpu")
    assert dtype == torch.complex128
    patches.apply("diffusers")
    with counted.DtypeCount("npu") as seen:
        dtype, ours = rotated(NPU)
    assert dtype == torch.float32 and seen.dtypes == {torch.float32}
    torch.testing.assert_close(ours, theirs.float(), rtol=1e-5, atol=1e-6)


def test_experts_of_diffusers_are_summed_on_the_host():
    """Where a kernel is missing; before that, the host waits for the number of tokens of each expert."""
    from diffusers.models.transformers.transformer_hidream_image import MOEFeedForwardSwiGLU

    patches.apply("diffusers")
    module, x = MOEFeedForwardSwiGLU(8, 16, 4, 2).eval(), drawn(1, 12, 8)
    exact = module(x)
    module, x = module.to(NPU), x.to(NPU)
    with patches.without("routed_experts"), pytest.raises(RuntimeError, match="scatter_reduce_"):
        module(x)
    with simulator.counting() as ran:
        ours = module(x)
    assert not simulator.host_syncs(ran) and not simulator.fallbacks(ran)
    torch.testing.assert_close(ours.cpu(), exact, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------ AdamW


def stepped():
    """Return weights, moments and steps after one update, and one more that is to be skipped; and what ran for both."""
    parameter = nn.Parameter(drawn(4, 4).to(NPU))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
    flags = torch.zeros((), device=NPU), torch.ones((), device=NPU)
    gradients = drawn(4, 4, seed=1).to(NPU), torch.full((4, 4), float("nan"), device=NPU)
    with simulator.counting() as ran:
        for gradient, flag in zip(gradients, flags):
            parameter.grad = gradient
            assert update.may_step(optimizer, flag)
            update.step(optimizer, flag)
    state = optimizer.state[parameter]
    return (parameter.detach(), state["exp_avg"], state["exp_avg_sq"], state["step"]), ran


def test_torch_npus_adamw_ignores_the_flag():
    with patches.without("fused_adamw"):
        (weights, *_), _ = stepped()
    assert weights.isnan().all(), "torch_npu honours found_inf now: end the row's versions"


def test_an_update_is_skipped_on_the_device_without_a_wait():
    with counters.counting() as counted:
        (weights, first, second, step), ran = stepped()
    assert not simulator.host_syncs(ran) and not simulator.fallbacks(ran)
    assert counted == {"adamw fused": 2}
    parameter = nn.Parameter(drawn(4, 4))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
    parameter.grad = drawn(4, 4, seed=1)
    optimizer.step()
    state = optimizer.state[parameter]
    for ours, theirs in ((weights, parameter), (first, state["exp_avg"]), (second, state["exp_avg_sq"])):
        torch.testing.assert_close(ours.cpu(), theirs.detach(), rtol=1e-6, atol=1e-7)
    assert step.item() == 1


@pytest.mark.parametrize("weights", [{}, {"full_precision": "bf16", "mixed_precision": "bf16"}], ids=["fp32", "kahan"])
def test_an_engine_skips_a_step_that_is_not_finite(weights):
    engine = built(config(weights), device="npu")
    micro = tiny_step(0, 8)
    engine.step(micro, COUNTS)
    before = {name: value.cpu().clone() for name, value, _ in engine.shards()}
    bad = tiny_step(1, 8)
    for batch in bad:
        for name, each in batch.features.items():
            batch.features[name] = torch.full_like(each, float("inf")) if each.is_floating_point() else each
    with simulator.counting() as ran:
        stats = engine.step(bad, COUNTS)
    assert stats.skipped.item() == 1.0
    assert ran["aten::_fused_adamw_"] and not set(simulator.host_syncs(ran)) - {
        "a non-blocking copy of pageable memory"
    }
    assert all(torch.equal(before[name], value.cpu()) for name, value, _ in engine.shards())
    assert engine.step(tiny_step(2, 8), COUNTS).skipped.item() == 0.0
    assert not all(torch.equal(before[name], value.cpu()) for name, value, _ in engine.shards())


def test_npu_apply_adam_w_is_the_same_update():
    """The operator that the registry does not take: its powers of beta are the host's, and cannot follow a skip."""
    import torch_npu

    ours, theirs = ([drawn(6, seed=i).abs().to(NPU) for i in range(4)] for _ in range(2))
    lr, beta1, beta2, eps, decay, t = 0.1, 0.9, 0.99, 1e-8, 0.1, 3
    fused_layers.adamw(
        *[[each] for each in ours], [], [torch.tensor(float(t), device=NPU)], lr=lr, beta1=beta1, beta2=beta2,
        weight_decay=decay, eps=eps, amsgrad=False, maximize=False,
    )  # fmt: skip
    weights, gradient, first, second = theirs
    torch_npu.npu_apply_adam_w(
        beta1 ** (t - 1), beta2 ** (t - 1), lr, decay, beta1, beta2, eps, gradient, None, False, False,
        out=(weights, first, second),
    )  # fmt: skip
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------ distributed


def strides():
    """Return the strides of a sliced parameter and of its gradient after DDP's backward."""
    root = nn.Linear(4, 5).to(NPU)
    root.weight = nn.Parameter(drawn(5, 8).to(NPU)[:, :4])
    wrapped = ddp.wrap(root, choose("npu"), TrainingSection())
    wrapped(drawn(2, 4).to(NPU)).sum().backward()
    return root.weight.stride(), root.weight.grad.stride()


def test_gradients_of_ddp_are_laid_out_as_their_parameters():
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    dist.init_process_group("hccl", rank=0, world_size=1)
    try:
        with patches.without("ddp_strides"):
            parameter, gradient = strides()
        assert parameter != gradient
        parameter, gradient = strides()
        assert parameter == gradient
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------------ what we do not call


LACKING = ("logsumexp", "conv3d", "convolution of five dimensions", "replication_pad")


def test_models_call_nothing_that_some_cann_lack_in_bf16():
    """logsumexp, conv3d and replicate padding of bf16 are missing before CANN 8: a family that needs them must mend them."""
    tiny = source("tiny")
    unet, vae = (tiny.build(part).to_empty(device=NPU).bfloat16() for part in ("unet", "vae"))
    for parameter in (*unet.parameters(), *vae.parameters()):
        nn.init.normal_(parameter, std=0.02)
    pooled = tiny.sizes["text_encoder_2"]["projection_dim"]
    with simulator.counting() as ran:
        posterior(vae, torch.zeros(1, 3, 64, 64, dtype=torch.uint8, device=NPU), fp32=False, batch_size=None)
        half = {"dtype": torch.bfloat16, "device": NPU}
        added = {"text_embeds": torch.zeros(1, pooled, **half), "time_ids": torch.zeros(1, 6, **half)}
        latents = torch.zeros(1, tiny.sizes["unet"]["in_channels"], 16, 16, **half)
        text = torch.zeros(1, 7, tiny.sizes["unet"]["cross_attention_dim"], **half)
        unet(latents, torch.zeros(1, device=NPU), text, added_cond_kwargs=added).sample.sum().backward()
    assert not [op for op in ran if any(name in op for name in LACKING)]
    gated = sum(isinstance(module, activations.GEGLU) for module in unet.modules())
    assert ran["npu::npu_geglu"] == ran["npu::npu_geglu_grad"] == gated > 0


def test_channels_last_is_refused():
    with pytest.raises(RuntimeError, match="MemoryFormat::Contiguous"):
        nn.Conv2d(2, 2, 1).to(NPU).to(memory_format=torch.channels_last)
