"""One gateway in front of a stand-in that speaks with Qwen3-VL's tokenizer, and both clients of each SDK.

`[[say TEXT]]` in the user's last words makes the stand-in answer TEXT; otherwise it tells what it received.
"""

from collections.abc import AsyncIterator, Iterator

import anthropic
import openai
import pytest

from tests.e2e.running import Running, running
from tests.pipeline.bundles import unpack_bundle

KEY = "sk-test"


@pytest.fixture(scope="package")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    bundle = unpack_bundle("qwen3_vl", tmp_path_factory.mktemp("bundle"))
    flags = ("--bundle", str(bundle), "--tokens-per-chunk", "2")
    with running("--pool-processes=1", f"--api-key={KEY}", engine=flags) as found:
        yield found


@pytest.fixture
def address(gateway: Running) -> str:
    return f"http://{gateway.gateway.host}:{gateway.gateway.port}"


@pytest.fixture(params=["sync", "async"])
async def chatgpt(request: pytest.FixtureRequest, address: str) -> AsyncIterator[openai.OpenAI | openai.AsyncOpenAI]:
    kind = {"sync": openai.OpenAI, "async": openai.AsyncOpenAI}[request.param]
    client = kind(base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=60)
    yield client
    closing = client.close()
    if closing is not None:
        await closing


@pytest.fixture(params=["sync", "async"])
async def claude(
    request: pytest.FixtureRequest, address: str
) -> AsyncIterator[anthropic.Anthropic | anthropic.AsyncAnthropic]:
    kind = {"sync": anthropic.Anthropic, "async": anthropic.AsyncAnthropic}[request.param]
    client = kind(base_url=address, api_key=KEY, max_retries=0, timeout=60)
    yield client
    closing = client.close()
    if closing is not None:
        await closing
