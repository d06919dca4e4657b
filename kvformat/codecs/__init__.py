"""Codecs: one small file each behind one interface."""
