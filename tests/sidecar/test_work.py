"""What of the pipeline's refusals a worker is told: what a client caused is final, what may pass is not."""

import pytest
from smg_grpc_servicer import mm_sidecar_protocol as published

from engines.base import Modality
from pipeline.errors import STATUS_OF_CODE, GatewayError
from pipeline.intake import failed
from pipeline.poolwork import PoolWork
from pipeline.sidecar import protocol
from pipeline.sidecar.work import refusal_of
from pool.pool import JobCrashed, JobFailed, JobLost, JobOverran


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (GatewayError("multimodal_processing_failed", "x", cause="host_refused"), "domain_not_allowed"),
        (GatewayError("multimodal_processing_failed", "x", cause="unavailable"), "fetch_unavailable"),
        (GatewayError("multimodal_processing_failed", "x", cause="failed"), "fetch_failed"),
        (GatewayError("multimodal_processing_failed", "x"), "decode_failed"),
        (GatewayError("multimodal_prompt_contract_mismatch", "x"), "placeholder_mismatch"),
        (GatewayError("context_length_exceeded", "x"), "limit_exceeded"),
        (GatewayError("multimodal_payload_too_large", "x"), "result_too_large"),
        (GatewayError("admission_queue_full", "x"), "sidecar_overloaded"),
        (failed("x", 3, "unavailable"), "fetch_unavailable"),
    ],
)
def test_codes(error: GatewayError, code: str) -> None:
    refusal = refusal_of(error)
    assert (refusal.code, refusal.message) == (code, error.message)


@pytest.mark.parametrize("code", STATUS_OF_CODE)
def test_every_refusal_has_a_code_and_overload_is_never_the_client_s_fault(code: str) -> None:
    refusal = refusal_of(GatewayError(code, "x"))
    assert refusal.code in protocol.CODES
    if STATUS_OF_CODE[code] in (429, 500, 503, 504):
        assert refusal.code not in published.CLIENT_ERROR_CODES
        assert refusal.code != published.CODE_RESULT_TOO_LARGE


@pytest.mark.parametrize(
    "error", [JobLost("signal 9"), JobCrashed("ValueError", "x"), JobOverran("x"), JobFailed("x")], ids=repr
)
def test_an_item_that_kills_or_overruns_is_not_sent_round_the_fleet(error: Exception) -> None:
    work = PoolWork.__new__(PoolWork)
    work._deadlines_s = {Modality.IMAGE: 1.0}
    with pytest.raises(GatewayError) as refused, work.told(0, Modality.IMAGE):
        raise error
    assert refusal_of(refused.value).code == "decode_failed"
