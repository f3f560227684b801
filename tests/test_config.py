"""ModelConfig against transformers' config classes, published parameter counts, and nonsense."""

import copy
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import tiny_config
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from minillm import ModelConfig, costs
from minillm.config import PRESETS
from minillm.hf_config import from_hf, llama3_rope_factors

SIZES = dict(
    vocab_size=97,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)


def rope(theta: float, **scaling: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_theta": theta, "rope_type": "default"} | scaling}


# the live config, and what it must become beyond SIZES
LIVE = {
    "llama": (
        LlamaConfig(**SIZES, max_position_embeddings=512, **rope(5e5)),
        dict(rope_theta=5e5, max_seq_len=512),
    ),
    "llama-biased": (
        LlamaConfig(**SIZES, attention_bias=True),
        dict(qkv_bias=True, attn_out_bias=True),
    ),
    "llama-tied": (
        LlamaConfig(**SIZES, tie_word_embeddings=True, rms_norm_eps=1e-5),
        dict(tie_embeddings=True, norm_eps=1e-5),
    ),
    "llama-scaled": (
        LlamaConfig(**SIZES, **rope(1e4, **LLAMA3)),
        dict(rope_factors=llama3_rope_factors(1e4, 4, 8.0, 1.0, 4.0, 64)),
    ),
    "llama-head_dim": (LlamaConfig(**SIZES, head_dim=10), dict(d_head=10)),
    "mistral": (
        MistralConfig(**SIZES, sliding_window=None, **rope(1e6)),
        dict(rope_theta=1e6, max_seq_len=131072),
    ),
    "qwen2": (
        Qwen2Config(**SIZES, **rope(1e6)),
        dict(rope_theta=1e6, qkv_bias=True, max_seq_len=32768),
    ),
    "qwen3": (Qwen3Config(**SIZES), dict(d_head=128, qk_norm=True, max_seq_len=32768)),
    "qwen3-biased": (
        Qwen3Config(**SIZES, head_dim=6, attention_bias=True),
        dict(d_head=6, qk_norm=True, qkv_bias=True, attn_out_bias=True, max_seq_len=32768),
    ),
}


def spelled_as_in_4(raw: dict[str, object]) -> dict[str, object]:
    """The same config with rope_theta and rope_scaling, as transformers 4 wrote it."""
    raw = dict(raw)
    parameters = dict(raw.pop("rope_parameters"))
    raw["rope_theta"] = parameters.pop("rope_theta")
    raw["rope_scaling"] = None if parameters["rope_type"] == "default" else parameters
    return raw


@pytest.mark.parametrize("spelling", [4, 5, "saved"])
@pytest.mark.parametrize("name", LIVE)
def test_from_hf_reads_live_configs_in_every_spelling(name: str, spelling: object) -> None:
    live, changes = LIVE[name]
    raw = live.to_diff_dict() if spelling == "saved" else live.to_dict()
    expected = dict(
        n_layers=3,
        d_model=24,
        n_heads=6,
        n_kv_heads=2,
        d_head=4,
        d_ff=40,
        vocab_size=97,
        max_seq_len=2048,
        name=name,
        norm_eps=1e-6,
    )
    expected = ModelConfig(**(expected | changes))
    assert from_hf(spelled_as_in_4(raw) if spelling == 4 else raw, name=name) == expected


def test_old_configs_may_leave_out_what_has_a_default() -> None:
    raw = dict(
        model_type="llama",
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=6,
        vocab_size=97,
    )
    config = from_hf(raw)
    assert (
        config.n_kv_heads,
        config.d_head,
        config.rope_theta,
        config.norm_eps,
        config.max_seq_len,
    ) == (6, 4, 1e4, 1e-6, 2048)
    assert not config.tie_embeddings and not config.qkv_bias


# What config.json may leave out: as many layers and heads as the classes need
LEAST = dict(hidden_size=64, intermediate_size=40, num_hidden_layers=1, vocab_size=97)


@pytest.mark.parametrize(
    ("cls", "changes"),
    [
        *((cls, {}) for cls in (LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config)),
        # Null is another thing; Mistral's class does not take it.
        *((cls, {"num_key_value_heads": None}) for cls in (LlamaConfig, Qwen2Config, Qwen3Config)),
    ],
)
def test_missing_keys_mean_what_they_mean_to_transformers(
    cls: type[PreTrainedConfig], changes: dict[str, object]
) -> None:
    sizes = LEAST | {"num_attention_heads": 32} | changes
    theirs = cls(**sizes)
    raw = {"model_type": cls.model_type} | sizes
    if cls is MistralConfig:  # its default window is refused, see below
        raw["sliding_window"] = None
    ours = from_hf(raw)
    assert ours.n_kv_heads == theirs.num_key_value_heads
    assert ours.max_seq_len == theirs.max_position_embeddings
    assert ours.d_head == getattr(theirs, "head_dim", 64 // 32)
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.attn_out_bias == getattr(theirs, "attention_bias", False)


def test_a_missing_window_is_the_default_one() -> None:
    raw = {"model_type": "mistral", "num_attention_heads": 8} | LEAST
    assert MistralConfig(**raw).sliding_window == 4096
    for positions in ({}, {"max_position_embeddings": 4097}):
        with pytest.raises(
            ValueError, match="sliding_window 4096, the default of mistral, is not implemented"
        ):
            from_hf(raw | positions)
    qwen = raw | {"model_type": "qwen3", "use_sliding_window": True}
    assert Qwen3Config(**qwen).sliding_window == 4096
    with pytest.raises(ValueError, match="sliding_window 4096, the default of qwen3, is not"):
        from_hf(qwen)


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3"])
def test_a_window_as_long_as_the_positions_hides_nothing(kind: str) -> None:
    raw = {"model_type": kind, "num_attention_heads": 32, "use_sliding_window": True} | LEAST
    assert from_hf(raw | {"max_position_embeddings": 4096}).max_seq_len == 4096
    assert from_hf(raw | {"max_position_embeddings": 16, "sliding_window": 16}).max_seq_len == 16


@pytest.mark.parametrize(
    "changes",
    [
        dict(architectures="LlamaForCausalLM"),
        dict(architectures=None),
        dict(hidden_act="swish"),
        dict(partial_rotary_factor=None),
        dict(rope_scaling={"rope_type": None}),
        dict(rope_scaling={}),
        dict(is_causal=True),
        dict(sliding_window=16),  # Llama has none, whatever its config says
    ],
    ids=str,
)
def test_other_spellings_of_what_is_implemented(changes: dict[str, object]) -> None:
    assert from_hf(raw_config(**changes)) == from_hf(raw_config())


@pytest.mark.parametrize("scaling", [dict(LLAMA3), dict(LLAMA3, rope_theta=2e5)])
def test_rope_scaling_counts_where_rope_parameters_are_there_too(
    scaling: dict[str, object],
) -> None:
    both = dict(rope_scaling=scaling, rope_theta=5e5, **rope(1e4))
    theirs = LlamaConfig(**SIZES, **both)
    ours = from_hf({"model_type": "llama"} | SIZES | both)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert (ours.rope_factors is None) == (theirs.rope_parameters["rope_type"] == "default")


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize(
    ("theta", "d_head", "original"), [(5e5, 128, 8192), (1e4, 64, 64), (1e4, 8, 2000)]
)
def test_llama3_factors_equal_transformers(
    theta: float, d_head: int, original: int, key: str
) -> None:
    scaling = {
        key: "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.5,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": original,
    }
    live = LlamaConfig(
        **SIZES,
        head_dim=d_head,
        rope_parameters={"rope_theta": theta} | scaling | {"rope_type": "llama3"},
    )
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](live, device=torch.device("cpu"))
    raw = spelled_as_in_4(live.to_dict()) | {"rope_theta": theta, "rope_scaling": scaling}
    factors = torch.tensor(from_hf(raw).rope_factors)
    ours = theta ** -(torch.arange(0, d_head, 2) / d_head) / factors
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    assert len({round(f, 3) for f in factors.tolist()}) > 1  # otherwise the sizes test nothing


def raw_config(cls: type[PreTrainedConfig] = LlamaConfig, **changes: object) -> dict[str, object]:
    return (
        cls(**SIZES, **({"sliding_window": None} if cls is MistralConfig else {})).to_dict()
        | changes
    )


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (raw_config(model_type="gemma"), "model_type 'gemma' is not implemented"),
        (raw_config(model_type=None), "model_type None"),
        (raw_config(MistralConfig, sliding_window=4096), "sliding_window 4096 is not implemented"),
        (
            raw_config(Qwen2Config, use_sliding_window=True, sliding_window=16),
            "sliding_window 16 is not implemented",
        ),
        (
            raw_config(Qwen3Config, layer_types=["full_attention", "sliding_attention"]),
            "only full attention",
        ),
        (raw_config(layer_types=5), "layer_types"),
        (
            raw_config(rope_scaling={"rope_type": "linear", "factor": 2.0}, rope_parameters=None),
            "rope scaling 'linear'",
        ),
        (
            raw_config(rope_scaling={"type": "dynamic", "factor": 2.0}, rope_parameters=None),
            "rope scaling 'dynamic'",
        ),
        (raw_config(**rope(1e4, rope_type="yarn", factor=2.0)), "rope scaling 'yarn'"),
        (raw_config(**rope(1e4, rope_type="llama3", factor=2.0)), "rope scaling llama3 needs"),
        (
            raw_config(**rope(1e4, **LLAMA3 | {"high_freq_factor": 0.5})),
            "rope scaling llama3 needs",
        ),
        (raw_config(**rope(1e4, **LLAMA3 | {"factor": 10**400})), "rope scaling llama3 needs"),
        (raw_config(**rope(1e4, **LLAMA3), head_dim=1 << 40), "d_head"),
        (raw_config(rope_parameters=[1]), "rope_parameters = .* must be an object"),
        (raw_config(**rope("10000")), "rope_theta is '10000'"),
        (raw_config(**rope(1.0)), "rope_theta is 1.0"),
        (raw_config(**rope(1e4, partial_rotary_factor=0.5)), "partial_rotary_factor 0.5"),
        (raw_config(partial_rotary_factor=0.25), "partial_rotary_factor 0.25"),
        (raw_config(hidden_act="gelu"), "hidden_act 'gelu'"),
        (raw_config(mlp_bias=True), "mlp_bias is not implemented"),
        (raw_config(quantization_config={"bits": 4}), "quantization_config is set"),
        (
            raw_config(architectures=["LlamaForSequenceClassification"]),
            "LlamaForSequenceClassification.* not implemented",
        ),
        (raw_config(architectures="LlamaModel"), "architectures .*LlamaModel.* not implemented"),
        (raw_config(architectures=7), "architectures 7 is not implemented"),
        (raw_config(is_causal=False), "is_causal False is not implemented"),
        (raw_config(is_causal=None), "is_causal None is not implemented"),
        (
            raw_config(Qwen2Config, use_sliding_window=True, sliding_window="4096"),
            "sliding_window '4096' is not implemented",
        ),
        (
            raw_config(rope_scaling=None, rope_parameters={"full_attention": {"rope_theta": 1e6}}),
            "rotary positions that differ by layer are not implemented",
        ),
        (raw_config(num_attention_heads=5, head_dim=None), "hidden_size 24 is not a multiple"),
        (raw_config(num_attention_heads=0, head_dim=None), "hidden_size 24 is not a multiple"),
        (raw_config(num_attention_heads=0), "n_heads is 0"),
        (raw_config(num_key_value_heads=4), "n_heads 6 is not a multiple of n_kv_heads 4"),
        (raw_config(head_dim=7), "d_head is 7; .* must be even"),
        (raw_config(hidden_size=True), "hidden_size = True"),
        (raw_config(hidden_size="24"), "hidden_size = '24'"),
        (raw_config(hidden_size=24.0), "hidden_size = 24.0"),
        (raw_config(num_hidden_layers=-1), "n_layers is -1"),
        (raw_config(intermediate_size=0), "d_ff is 0"),
        (raw_config(vocab_size=1 << 60), "vocab_size is .* whole number from 1"),
        (raw_config(max_position_embeddings=10**400), "max_seq_len is"),
        (raw_config(attention_bias=1), "attention_bias = 1; it must be true or false"),
        (raw_config(tie_word_embeddings="yes"), "tie_word_embeddings = 'yes'"),
        (raw_config(rms_norm_eps=0.0), "norm_eps is 0.0"),
        (raw_config(rms_norm_eps=10**400), "norm_eps is"),
        (raw_config(rms_norm_eps=float("nan")), "norm_eps is nan"),
        (raw_config(rms_norm_eps=None), "norm_eps is None"),
        ([1, 2], "The config is a list"),
    ],
)
def test_refusals_name_the_reason(raw: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        from_hf(raw)


REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_sizes_are_named(key: str) -> None:
    raw = raw_config()
    del raw[key]
    with pytest.raises(ValueError, match=f"{key} = None"):
        from_hf(raw)


NUMBERS = st.integers() | st.sampled_from(
    [0, -1, 1 << 63, 10**400, 1e308, -0.0, float("inf"), float("nan"), 5e-324]
)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=5,
)
BASES = [raw_config(cls) for cls in (LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config)] + [
    raw_config(**rope(1e4, **LLAMA3)),
    spelled_as_in_4(raw_config(**rope(1e4, **LLAMA3))),
]


# Derandomized, here and in the other files: the same examples on every run, so that no failure
# comes and goes.
@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_from_hf_gives_a_config_or_a_value_error(data: st.DataObject) -> None:
    raw = copy.deepcopy(data.draw(st.sampled_from(BASES)))
    for _ in range(data.draw(st.integers(1, 3))):
        part = raw
        for key in ("rope_parameters", "rope_scaling"):
            if isinstance(raw.get(key), dict) and raw[key] and data.draw(st.booleans()):
                part = raw[key]
        part[data.draw(st.sampled_from(sorted(part)))] = data.draw(JSON)
    try:
        config = from_hf(raw)
    except ValueError as error:
        assert str(error).endswith(".")
    else:
        assert costs.param_count(config) > 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(n_layers=True), "n_layers is True"),
        (dict(d_model=24.0), "d_model is 24.0"),
        (dict(norm="batchnorm"), "norm is 'batchnorm'; choose one of rmsnorm, layernorm"),
        (dict(mlp="relu2"), "mlp is 'relu2'"),
        (dict(positions="alibi"), "positions is 'alibi'"),
        (dict(rope_theta=-1.0), "rope_theta is -1.0"),
        (dict(rope_theta=10**400), "rope_theta is"),
        (dict(rope_factors=(1.0,)), "rope_factors has 1 entries; d_head 8 needs 4"),
        (dict(rope_factors=(1.0, 1.0, 0.0, 1.0)), "rope_factors must be positive"),
        # Positive as Python counts, but 0 or infinite in float32: the logits would not be numbers.
        (dict(rope_factors=(1.0, 1.0, 1e-300, 1.0)), "rope_factors must be positive"),
        (dict(norm_eps=1e-300), "norm_eps is 1e-300"),
        (dict(norm_eps=1e300), "norm_eps is 1e[+]300"),
    ],
)
def test_the_dataclass_checks_itself(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tiny_config(**change)


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny_config().n_layers = 3


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("gpt3-175b", 174604259328),
        ("opt-13b", 12853473280),
        ("llama-2-7b", 6738415616),
        ("llama-2-70b", 68976648192),
        ("mistral-7b", 7241732096),
        ("llama-3-8b", 8030261248),
        ("smollm2-135m", 134515008),
        ("qwen3-0.6b", 596049920),
    ],
)
def test_presets_have_the_published_parameter_totals(name: str, total: int) -> None:
    config = ModelConfig.preset(name)
    assert costs.param_count(config) == total
    assert config.name == name
    assert config.runnable == (name not in ("gpt3-175b", "opt-13b"))


def test_every_preset_is_listed_when_a_name_is_unknown() -> None:
    with pytest.raises(
        ValueError, match=r"no preset 'gpt-5'; choose one of .*qwen3-0\.6b"
    ) as error:
        ModelConfig.preset("gpt-5")
    assert all(name in str(error.value) for name in PRESETS)
