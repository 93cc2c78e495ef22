"""The fingerprint against the published one, and against what a real published sidecar announced."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_servicer.mm_sidecar_protocol import Fingerprint as Published
from smg_grpc_servicer.vllm.mm_processor import resolved_mm_limits

from pipeline.sidecar.fingerprint import Fingerprint, limits_text
from tests.sidecar.records import record

TEXTS = st.text(max_size=20)
SEVEN = st.tuples(*(TEXTS for _ in range(7)))


@given(SEVEN, SEVEN)
def test_namespace_and_mismatches_are_the_published_ones(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    ours, theirs = Fingerprint(*one), Published(*one)
    assert ours.namespace() == theirs.namespace()
    assert ours.mismatches(Fingerprint(*other)) == theirs.mismatches(Published(*other))
    assert ours.fields() == theirs.to_hello()


def _resolved(given_limits: dict[str, object]) -> str:
    """As the published worker makes it of vLLM's configuration (`get_limit_per_prompt`, validated options)."""
    options = {
        modality: {"count": value} if isinstance(value, int) else {"count": 999, **value}  # type: ignore[dict-item]
        for modality, value in given_limits.items()
    }
    config = SimpleNamespace(
        limit_per_prompt=options,
        get_limit_per_prompt=lambda modality: options[modality]["count"] if modality in options else 999,
    )
    return json.dumps(resolved_mm_limits(config), sort_keys=True, default=str)


COUNTS = st.integers(0, 2000)
OPTIONS = st.fixed_dictionaries(
    {}, optional={"count": COUNTS, "num_frames": st.integers(1, 99), "width": st.none() | st.integers(1, 9999)}
)


@given(st.dictionaries(st.sampled_from(["image", "video", "audio"]), COUNTS | OPTIONS))
def test_limits_are_resolved_as_the_published_worker_does(limits: dict[str, object]) -> None:
    assert limits_text(limits) == _resolved(limits)


def test_limits_are_what_a_real_sidecar_announced() -> None:
    said = record("qwen3_vl")
    given_limits = json.loads(said.flags[said.flags.index("--limit-mm-per-prompt") + 1])
    assert limits_text(given_limits) == said.hello["limit_per_prompt"]


@pytest.mark.parametrize("bad", [{"image": "four"}, {"image": -1}, {"image": True}, {"image": {"count": 1.5}}])
def test_limits_that_are_none(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="image"):
        limits_text(bad)


def test_a_limit_is_the_modality_s_own_or_the_unset_one() -> None:
    made = Fingerprint(*["x"] * 6, limits_text({"image": 4}))
    assert (made.limit("image"), made.limit("video")) == (4, 999)
    with pytest.raises(ValueError, match="limit_per_prompt"):
        Fingerprint(*["x"] * 7).limit("image")
