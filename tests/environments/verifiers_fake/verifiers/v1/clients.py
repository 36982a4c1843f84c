from types import SimpleNamespace

ModelContext = SimpleNamespace
