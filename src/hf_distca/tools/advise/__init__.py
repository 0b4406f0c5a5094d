"""Estimates what hf-distca would gain on documents that a user has, without a GPU and without
loading a model.
"""
