"""Undocumented parts of lark: those in one table exist in the installed lark, and no others are used.

A lark that changes them fails here, by name, before it parses differently from the tables.
"""

import ast
import importlib
import inspect
from pathlib import Path

import lark
import pytest
from lark import load_grammar
from lark.grammar import RuleOptions
from lark.indenter import Indenter
from lark.lexer import PatternRE, PatternStr, TerminalDef

import llmppl

PACKAGE = Path(llmppl.__file__).parent
LARK_INTERNALS = {                                  # undocumented names that llmppl/grammar uses, and why
    "lark.load_grammar": "the module of the functions that run here with two of their globals replaced",
    "lark.load_grammar.EBNF_to_BNF": "writes rules out; in transform and _add_rule a rule may become an automaton",
    "lark.load_grammar.EBNF_to_BNF.transform": "is called for every rule",
    "lark.load_grammar.EBNF_to_BNF.prefix": "the name of the rule that is written out",
    "lark.load_grammar.EBNF_to_BNF.new_rules": "the additional rules that it has become",
    "lark.load_grammar.EBNF_to_BNF._add_rule": "is called for every rule that a repeat makes",
    "lark.load_grammar.EBNF_to_BNF._name_rule": "names the rules for the states of an automaton",
    "lark.load_grammar.Grammar": "a loaded grammar: its rule_defs hold the rules' options",
    "lark.load_grammar.Grammar.compile": "makes terminals and rules of it; run with another EBNF_to_BNF",
    "lark.load_grammar.GrammarBuilder": "loads a grammar and its imports",
    "lark.load_grammar.GrammarBuilder.load_grammar": "run with another resolve_term_references",
    "lark.load_grammar.GrammarBuilder.build": "gives the loaded grammar",
    "lark.load_grammar.resolve_term_references": "puts terminals into terminals; their size is counted before",
    "lark.load_grammar._EMPTY": "stands for a part that [] leaves out",
    "lark.grammar.NonTerminal": "a rule's name in a tree",
    "lark.grammar.RuleOptions": "a rule's priority",
    "lark.grammar.Terminal": "a terminal's name in a tree",
    "lark.lexer.TerminalDef": "a terminal that lark has compiled: name, pattern, priority",
    "lark.lexer.PatternStr": "the pattern of a terminal that is a string",
    "lark.indenter.Indenter._process": "must be lark's own: its work is done by columns here",
    "lark.indenter.Indenter.handle_NL": "must be lark's own",
}
DOCUMENTED = {"lark.Lark", "lark.Tree", "lark.indenter.Indenter", "lark.exceptions.GrammarError",
              "lark.exceptions.LarkError", "lark.exceptions.UnexpectedInput"}  # fmt: skip
SIGNATURES = {
    "lark.load_grammar.EBNF_to_BNF": "()",
    "lark.load_grammar.EBNF_to_BNF._add_rule": "(self, key, name, expansions)",
    "lark.load_grammar.EBNF_to_BNF._name_rule": "(self, inner)",
    "lark.load_grammar.Grammar.compile": "(self, start, terminals_to_keep)",
    "lark.load_grammar.GrammarBuilder.build": "(self)",
    "lark.load_grammar.GrammarBuilder.load_grammar": "(self, grammar_text, grammar_name, mangle)",
    "lark.load_grammar.resolve_term_references": "(term_dict)",
    "lark.grammar.NonTerminal": "(name)",
    "lark.grammar.Terminal": "(name, filter_out)",
    "lark.lexer.TerminalDef": "(name, pattern, priority)",
    "lark.indenter.Indenter._process": "(self, stream)",
    "lark.indenter.Indenter.handle_NL": "(self, token)",
}


def found(name):
    """Return the object of a dotted name; an attribute of instances is that of a new instance."""
    parts = name.split(".")
    module = ".".join(parts[: 2 if parts[1].islower() else 1])
    value = importlib.import_module(module)
    for part in parts[module.count(".") + 1 :]:
        value = getattr(value, part) if hasattr(value, part) else getattr(value(), part)
    return value


@pytest.mark.parametrize("name", LARK_INTERNALS)
def test_every_used_part_of_lark_exists(name):
    value = found(name)
    assert LARK_INTERNALS[name]
    if name in SIGNATURES:
        assert "(" + ", ".join(inspect.signature(value).parameters) + ")" == SIGNATURES[name]


def test_the_functions_of_lark_read_the_replaced_globals():
    compile, load = load_grammar.Grammar.compile, load_grammar.GrammarBuilder.load_grammar
    assert "EBNF_to_BNF" in compile.__code__.co_names and not compile.__closure__
    assert "resolve_term_references" in load.__code__.co_names and not load.__closure__
    assert "_name_rule" in load_grammar.EBNF_to_BNF._add_repeat_rule.__code__.co_names
    assert compile.__globals__ is load.__globals__ is vars(load_grammar)


def test_loaded_and_compiled_grammars_have_the_fields_that_we_read():
    builder = load_grammar.GrammarBuilder(False, [])
    builder.load_grammar('start.2: "a" B?\nB.3: /b+/i\n%ignore " "', "<string>")
    loaded = builder.build()
    (name, parameters, tree, options), = loaded.rule_defs
    assert (name, list(parameters), options.priority) == ("start", [], 2) and isinstance(tree, lark.Tree)
    terminals, rules, ignored = loaded.compile(["start"], set())
    patterns = {t.name: (t.priority, type(t.pattern), t.pattern.value, set(t.pattern.flags)) for t in terminals}
    assert patterns["B"] == (3, PatternRE, "b+", {"i"}) and patterns["A"] == (0, PatternStr, "a", set())
    (b,) = [t for t in terminals if t.name == "B"]
    assert isinstance(b, TerminalDef) and (b.pattern.min_width, b.pattern.to_regexp()) == (1, "(?i:b+)")
    assert b.pattern.max_width > 1 and len(ignored) == 1
    assert sorted([symbol.name for symbol in rule.expansion] for rule in rules) == [["A"], ["A", "B"]]
    assert {(rule.origin.name, rule.options.priority) for rule in rules} == {("start", 2)}
    assert RuleOptions(priority=2).priority == 2


def test_an_indenter_has_the_terminals_that_we_read():
    names = ["NL_type", "OPEN_PAREN_types", "CLOSE_PAREN_types", "INDENT_type", "DEDENT_type", "tab_len"]
    assert set(names) <= set(vars(Indenter)) and hasattr(Indenter, "always_accept")


def chain(node):
    """`a.b.c` as ["a", "b", "c"]; None if it does not begin with a name."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else None


def used(source):
    """Return the dotted names of lark that a file uses: imports, their attributes, and inherited attributes."""
    tree = ast.parse(source)
    imported, names = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lark":
            imported.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
        elif isinstance(node, ast.Import):
            larks = [alias for alias in node.names if alias.name.split(".")[0] == "lark"]
            imported.update({alias.asname or alias.name: alias.name for alias in larks})
    names |= set(imported.values())
    for node in ast.walk(tree):
        parts = chain(node) if isinstance(node, ast.Attribute) else None
        if parts and parts[0] in imported:
            names |= {".".join([imported[parts[0]], *parts[1:n]]) for n in range(2, len(parts) + 1)}
        if isinstance(node, ast.ClassDef):
            bases = [imported[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in imported]
            attributes = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
            own = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute) and
                   isinstance(each.ctx, ast.Store)}  # fmt: skip
            names |= {f"{base}.{name}" for base in bases for name in attributes - own
                      if name[:2] != "__" and name not in vars(object) and has(base, name)}  # fmt: skip
    return {name for name in names if "__" not in name}


def has(base, name):
    try:
        return found(f"{base}.{name}") is not None
    except (AttributeError, TypeError):
        return False


def test_no_other_part_of_lark_is_used():
    everywhere = {path: used(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    assert {path.parent.name for path, names in everywhere.items() if names} == {"lark"}
    names = set().union(*everywhere.values())
    assert names - DOCUMENTED - LARK_INTERNALS.keys() == set()
    texts = "".join(path.read_text(encoding="utf-8") for path in (PACKAGE / "constraints" / "lark").glob("*.py"))
    assert [name for name in LARK_INTERNALS if name.rpartition(".")[2] not in texts] == []


def test_a_use_of_lark_outside_the_table_would_be_found():
    source = "from lark.parsers import lalr_analysis as a\nfrom lark import load_grammar\n_ = load_grammar.Grammar\n"
    rule = "lark.parsers.lalr_analysis.Rule"
    grammar = {"lark.load_grammar", "lark.load_grammar.Grammar"}
    assert used(source + "a.Rule._x.y") == {"lark.parsers.lalr_analysis", rule, f"{rule}._x", f"{rule}._x.y", *grammar}
    assert "lark.load_grammar.EBNF_to_BNF._add_rule" in used(
        "from lark.load_grammar import EBNF_to_BNF\nclass X(EBNF_to_BNF):\n def f(self): self._add_rule(1, 2, 3)\n"
    )
