"""The advisor: which spec for which operand, for the smallest predicted loss change within a budget of bits or time.

costs.py    what each operand would cost in each scored spec, from the index
roofline.py the time of GEMMs on a device, by the formats of their operands
choice.py   the cheapest choice, an integer linear program
advice.py   the choice as a recipe, compared with uniform and published recipes, and the runs that test it
"""
