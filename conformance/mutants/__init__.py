"""Readers with one fault each, made from the reference: does the suite notice every one of them?"""
