from types import SimpleNamespace

EvalClientConfig = SimpleNamespace
