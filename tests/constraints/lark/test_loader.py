"""Undocumented parts of lark that the grammars use: a lark that changes them fails here, by name."""

import importlib
import inspect

import lark
import pytest
from lark import load_grammar
from lark.common import ParserConf
from lark.grammar import RuleOptions
from lark.indenter import Indenter
from lark.lexer import PatternRE, PatternStr, TerminalDef
from lark.parsers.lalr_analysis import LALR_Analyzer, Shift

SIGNATURES = {
    "lark.load_grammar.Grammar.compile": "(self, start, terminals_to_keep)",
    "lark.load_grammar.GrammarBuilder._define": "(self, name, is_term, exp, params, options, override)",
    "lark.load_grammar.GrammarBuilder.build": "(self)",
    "lark.load_grammar.GrammarBuilder.load_grammar": "(self, grammar_text, grammar_name, mangle)",
    "lark.grammar.NonTerminal": "(name)",
    "lark.grammar.Rule": "(origin, expansion, order, alias, options)",
    "lark.grammar.Terminal": "(name, filter_out)",
    "lark.lexer.TerminalDef": "(name, pattern, priority)",
    "lark.indenter.Indenter._process": "(self, stream)",
    "lark.indenter.Indenter.handle_NL": "(self, token)",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_every_used_part_of_lark_has_its_signature(name):
    module, *parts = name.split(".")[:2], *name.split(".")[2:]
    value = importlib.import_module(".".join(module))
    for part in parts:
        value = getattr(value, part)
    assert "(" + ", ".join(inspect.signature(value).parameters) + ")" == SIGNATURES[name]


def test_loaded_and_compiled_grammars_have_the_fields_that_we_read():
    builder = load_grammar.GrammarBuilder(False, [])
    builder.load_grammar('start.2: "a" B? C~3\nC: "c"\nB.3: /b+/i\n%ignore " "', "<string>")
    assert builder._definitions["B"].is_term and isinstance(builder._definitions["B"].tree, lark.Tree)
    loaded = builder.build()
    (name, parameters, tree, options), = loaded.rule_defs
    assert (name, list(parameters), options.priority) == ("start", [], 2) and isinstance(tree, lark.Tree)
    assert [list(map(str, part.children[1:])) for part in tree.find_data("expr")] == [["?"], ["~", "3"]]
    terminals, rules, ignored = loaded.compile(["start"], set())
    patterns = {t.name: (t.priority, type(t.pattern), t.pattern.value, set(t.pattern.flags)) for t in terminals}
    assert patterns["B"] == (3, PatternRE, "b+", {"i"}) and patterns["A"] == (0, PatternStr, "a", set())
    (b,) = [t for t in terminals if t.name == "B"]
    assert isinstance(b, TerminalDef) and (b.pattern.min_width, b.pattern.to_regexp()) == (1, "(?i:b+)")
    assert b.pattern.max_width > 1 and len(ignored) == 1
    names = [[symbol.name for symbol in rule.expansion] for rule in rules]
    assert sorted(names) == [["A", "B", "C", "C", "C"], ["A", "C", "C", "C"]]
    assert {(rule.origin.name, rule.options.priority) for rule in rules} == {("start", 2)}
    assert RuleOptions(priority=2).priority == 2


def test_the_analysis_of_lark_gives_actions_by_state():
    rules = lark.Lark('start: "a" start | "b"', parser="lalr").rules
    analyzer = LALR_Analyzer(ParserConf(rules, {}, ["start"]))
    analyzer.compute_lalr()
    table = analyzer.parse_table
    begun, ended = table.states[table.start_states["start"]], table.states[table.end_states["start"]]
    assert begun.keys() == {"A", "B", "start"} and {action for action, _ in begun.values()} == {Shift}
    ((action, rule),) = table.states[begun["B"][1]].values()
    assert action is not Shift and rule.origin.name == "start" and begun["start"][1] == table.end_states["start"]
    assert not ended


def test_an_indenter_has_the_terminals_that_we_read():
    names = ["NL_type", "OPEN_PAREN_types", "CLOSE_PAREN_types", "INDENT_type", "DEDENT_type", "tab_len"]
    assert set(names) <= set(vars(Indenter)) and hasattr(Indenter, "always_accept")
