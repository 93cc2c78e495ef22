"""The demo's model, loaded as the gateway loads it, for subjects that call the gateway's own functions."""

from engines.worker import Worker, WorkerSpec
from pipeline.bundle import load_bundle
from pipeline.catalog import Catalog
from pipeline.config import Config
from pipeline.plan import ServedModel
from tools.fake_engine import BUNDLE

MODEL = "qwen3-vl-demo"


def demo_model() -> ServedModel:
    """Text and pictures; its configuration reaches no pool."""
    worker = Worker(WorkerSpec(url="grpc://127.0.0.1:1"), "grpc://127.0.0.1:1")
    worker.learn({"served_model_name": MODEL})
    return Catalog(Config(), lambda key, payload: None)._serve(worker, load_bundle(BUNDLE))
