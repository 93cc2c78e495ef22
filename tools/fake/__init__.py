"""The parts of the engine stand-in (`tools/fake_engine.py`): what it checks, what it says, how it fails."""
