"""Grammar engines: entry points in `octavo.grammar`, chosen by `executor.grammar`; their contract is in core/grammar.

schemas.py      JSON schemas and regular expressions as text: what is checked before any engine sees them, and where
                one that an engine does not serve is wrong
llguidance.py   the llguidance library: the default
kept.py         which schemas xgrammar keeps to, in the words in which it does
xgrammar.py     the xgrammar library
"""
