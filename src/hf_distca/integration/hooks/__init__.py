"""Functions that transformers, models and Trainers call: attention, masks, layers, steps.

May import `checks` and files beside this folder.
"""
