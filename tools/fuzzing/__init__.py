"""Hostile input by subject.  A case is made from one whole number alone, so a finding is repeated by its number.

`rig` runs cases in a child process and judges from outside; `mutate`, `formats` and `bombs` spoil files; the other
modules are subjects: what is fed, to what, and which answers are right.
"""
