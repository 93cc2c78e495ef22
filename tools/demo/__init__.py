"""The demonstration behind `gateway.py --demo`: a built-in bundle, a generated picture, an engine stand-in, and a
reference.
"""

from tools.demo.flow import run_demo

__all__ = ["run_demo"]
