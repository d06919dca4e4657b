"""Makes the conformance cases: ``python -m conformance.generate [--check | --new]``."""
