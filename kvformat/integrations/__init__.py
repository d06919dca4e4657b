"""kvformat in the programs that make and use KV caches; each module needs its own extra."""
