"""Order of the package's folders: a file imports from its own folder and from the folders before it."""

FOLDERS = [
    "support", "report", "native", "constraints.constraint", "constraints.vocabulary", "constraints.masks",
    "constraints.machine", "constraints.automata",
    "constraints.json", "constraints.lark", "constraints.values", "constraints", "distributions", "lm", "models",
    "inference", "queries", "tasks", "decisions", "serving", "checking", "testing", "cli", "__main__", "__init__",
]  # fmt: skip
