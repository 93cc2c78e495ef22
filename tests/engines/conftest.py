"""Engine tests run on the project's own event loop."""

import grpc.aio
import uvloop

# The library's poller stays to the end of the run.  It would be shut down, and waited for, when the last server is
# collected, which may be in the middle of a later test.
grpc.aio.init_grpc_aio()


def pytest_asyncio_loop_factories(config, item):
    return {"uvloop": uvloop.new_event_loop}
