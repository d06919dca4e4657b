"""Property-based mode: artifacts nobody wrote down, laws that hold for all of them.

``strategies`` are Hypothesis strategies of plans of artifacts, for the tests of any
implementation; ``compose`` makes their bytes by hand; ``naive`` restores them straight from the
text of the specification; ``laws`` says what a reader must answer; ``hunt`` asks it and writes
what it gets wrong as a case folder. Needs the extra ``kvconform[fuzz]``.
"""
