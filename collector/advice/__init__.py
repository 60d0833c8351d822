"""The advisor: which spec for which operand, for the smallest loss within a budget of bits, from measured effects.

costs.py    what each group of operands costs in each measured spec, from the index
choice.py   the cheapest choice, an integer linear program
advice.py   the choice as a recipe, compared with single formats, and the runs that test it
"""
