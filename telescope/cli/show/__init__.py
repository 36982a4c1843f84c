"""`telescope show RUN_DIR`: what a run has learnt on one page, and where it has not, what to try next.

curves     numbers over a run, short enough for a line of text
figures    what rows and files of a run directory say, as numbers
advice     rules over these numbers
page       both, as text
main       the command
"""
