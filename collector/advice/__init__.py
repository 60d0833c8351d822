"""The advisor: which format for which group of products, for the smallest loss within a budget of bits.

choice.py        the cheapest choice, an integer linear program
advice.py        a reading of an experiment: the choice as a recipe, and what it costs evaluated whole
measured.py      measures what is missing, then evaluates the choice whole
verification.py  the runs that test it
scales.py        which tensor scale suits each operand
"""
