"""Where state could hide, read from the source: shared values, marks on other things."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import forgekit as fk

PACKAGE = Path(fk.__file__).parent
FOLDERS = ("parallel", "steps", "run")
FILES = [
    *(path for folder in FOLDERS for path in sorted((PACKAGE / folder).rglob("*.py"))),
    PACKAGE / "mesh.py",
    PACKAGE / "state.py",
]

CONSTANT_CALLS = {
    "MappingProxyType",
    "frozenset",
    "ParamSpec",
    "TypeVar",
    "timedelta",
    "torch.device",
    "logging.getLogger",
    "re.compile",
    "os.path.join",
    "str",
    "getattr",
    "slice",
    "Shard",
    "_Rule",
    "Machine",
    "_peaks",
    "Topic",
}
"""Calls whose results cannot change, or that are the process's own (loggers)."""


def _is_constant(value: ast.expr) -> bool:
    """Whether a value can never change: no list, dictionary or set, and no unknown call."""
    if isinstance(value, ast.Call):
        name = ast.unparse(value.func)
        is_table = name in ("MappingProxyType", "frozenset")
        inner = [*value.args, *(keyword.value for keyword in value.keywords)]
        return name in CONSTANT_CALLS and all(_is_table(v) if is_table else True for v in inner)
    mutable = ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp
    if isinstance(value, mutable | ast.GeneratorExp):
        return False
    if isinstance(value, ast.Subscript | ast.Lambda):  # a type, an item of a constant, a function
        return True
    return all(_is_constant(v) for v in ast.iter_child_nodes(value) if isinstance(v, ast.expr))


def _is_table(value: ast.expr) -> bool:
    """Whether what is wrapped at once, so that no other name holds it, has constant items."""
    items = value.elts if isinstance(value, ast.List | ast.Set | ast.Tuple) else [value]
    items = value.values if isinstance(value, ast.Dict) else items
    if isinstance(value, ast.GeneratorExp | ast.DictComp | ast.SetComp | ast.ListComp):
        items = [value.value if isinstance(value, ast.DictComp) else value.elt]
    return all(_is_constant(item) for item in items)


def _shared_values(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Values that a module or a class holds for good and that can change."""
    bodies = [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    for node in (statement for body in bodies for statement in body.body):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            is_field = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in (
                "attrs.field",
                "dataclasses.field",
            )
            if ast.unparse(target) != "__all__" and not is_field and not _is_constant(node.value):
                yield node.lineno, ast.unparse(node)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield node.lineno, ast.unparse(node)
        for decorator in getattr(node, "decorator_list", ()):
            if ast.unparse(decorator).split("(")[0].endswith("cache"):
                yield node.lineno, ast.unparse(decorator)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_holds_a_value_that_can_change(path):
    assert list(_shared_values(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    "source",
    [
        "known = {}",
        "known: dict[str, int] = {1: 2}",
        "known = []",
        "known = weakref.WeakKeyDictionary()",
        "known = defaultdict(list)",
        "known = (1, [2])",
        "known = MappingProxyType({'a': []})",
        "known = MappingProxyType(other())",
        "known = {n: 1 for n in range(2)}",
        "class A:\n    known = {}",
        "class A:\n    known: list[int] = []",
        "def f():\n    global known\n    known = 1",
        "@lru_cache(maxsize=4)\ndef f(): ...",
        "@cache\ndef f(): ...",
    ],
)
def test_the_rule_finds_values_that_can_change(source):
    assert len(list(_shared_values(ast.parse(source)))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "known = MappingProxyType({'a': (1, 2)})",
        "known = frozenset({1, 2})",
        "known = ('a', 'b')",
        "Kind = Literal['a', 'b']",
        "known: Mapping[str, int] = MappingProxyType({'a': 1})",
        "known = 2**20",
        "__all__ = ['a']",
        "@attrs.frozen\nclass A:\n    known: Any = attrs.field(factory=dict)",
    ],
)
def test_the_rule_lets_constants_pass(source):
    assert list(_shared_values(ast.parse(source))) == []


TORCH = "a field of torch's own"
WHILE = "put back before the function returns"
OWN = "an object of this file's own class, or one that it has just made"
SETUP = "part of what parallelize makes of the model, once"
ASSIGNED: dict[str, dict[str, str]] = {
    "state.py": {
        "setattr(model, _ATTRIBUTE, layout)": "the one place: where parallelize leaves it"
    },
    "parallel/module_forward.py": {"module.forward": SETUP, "module._parameters": WHILE},
    "parallel/parallelize.py": {"register_forward_hook(share_logits)": SETUP},
    "parallel/expert.py": {"owner.dispatch": SETUP, "part._parameters[leaf]": SETUP},
    "parallel/context/context_parallel.py": {"vars(modules[name]).update(own)": "the sockets"},
    "parallel/activation_checkpoint.py": {"vars(self).update(vars(torch_mode))": OWN},
    "parallel/tensor/styles.py": {
        "module.bias": SETUP,
        "register_parameter(leaf, _shard(experts.get_parameter(leaf), mesh, own))": SETUP,
        "module.reduce": SETUP,
        "module.add_up": "the sockets of an adapter",
        "module.drop": "the sockets of an adapter",
        "register_parameter(name, _shard(parameter, mesh, own))": SETUP,
        "module._parameters": WHILE,
        "module.padding_idx": WHILE,
        "module.num_experts": WHILE,
        "module._is_expert_parallel": WHILE,
    },
    "parallel/tensor/tensor_parallel.py": {
        "register_parameter(leaf, model.get_parameter(names[0]))": SETUP
    },
    "parallel/tensor/sharded_logits.py": {
        "made.shards": OWN,
        "made._whole": OWN,
        "register_hook(full)": "autograd's, of one result",
    },
    "parallel/tensor/plan_proof.py": {
        "register_forward_pre_hook(lambda m, _args, uses=uses: uses(m))": WHILE,
        "register_forward_hook(note)": WHILE,
        "register_forward_hook(check)": WHILE,
    },
    "parallel/fsdp.py": {
        "register_parameter(leaf, found[-1])": SETUP,
        "register_hook(lambda _, name=name: found.add(name))": WHILE,
        "parameter.grad": TORCH,
        "parameter.sharded_param.grad": TORCH,
        "parameter._unsharded_param.grad": TORCH,
        "parameter.unsharded_accumulated_grad": TORCH,
        "fsdp_state._training_state": TORCH,
        "group._training_state": TORCH,
        "group._partial_reduce_output": TORCH,
        "group._post_forward_indices.clear()": TORCH,
        "context.iter_forward_root": TORCH,
        "context.post_backward_final_callback_queued": TORCH,
    },
    "parallel/pipeline/split.py": {
        "part.parent._modules[part.child]": SETUP,
        "twins[part.parent]._modules[part.child]": OWN,
        "twin._modules.update({n: twins[m] for n, m in _children(module) if m in twins})": OWN,
        "setattr(twin, name, value.copy())": OWN,
        "register_forward_pre_hook(partial(_refuse_left_out, part.name))": SETUP,
    },
    "parallel/pipeline/stages.py": {
        "twin.training": TORCH,
        "setattr(twin, name, vars(original)[name])": "a stage's copy follows the model's sockets",
    },
    "parallel/pipeline/stage_tensors.py": {
        "setattr(self, key, value)": OWN,
        "register_forward_hook(keep)": "a part sends its output; the layout's stages say which",
    },
    "parallel/pipeline/runtime.py": {
        "stage.compute": OWN,
        "stage.has_backward": OWN,
        "built.tag": OWN,
        "built._runtime_validate": OWN,
        "operation.tag": TORCH,
        "register_hook(Tensor.contiguous)": "autograd's, of one result",
    },
    "parallel/pipeline/tracing.py": {
        "register_forward_pre_hook(enter, with_kwargs=True)": WHILE,
        "register_forward_hook(leave)": WHILE,
        "delattr(module, name)": WHILE,
        "vars(module).update(plain)": WHILE,
        "module._buffers[name]": WHILE,
    },
    "steps/accumulate.py": {
        "pulled.samples": OWN,
        "parameter.grad": TORCH,
        "register_forward_hook(check_output)": WHILE,
    },
    "steps/experts.py": {"register_forward_pre_hook(self._add_routing, with_kwargs=True)": WHILE},
    "steps/forward.py": {"module.training": TORCH},
    "steps/losses.py": {"register_hook(_without_nan)": "autograd's, of one result"},
    "steps/position_proof.py": {
        "vars(module)[name]": WHILE,
        "router.spec": WHILE,
        "vars(module).update(sockets)": WHILE,
        "register_module_forward_pre_hook(replace)": WHILE,
        "register_forward_hook(note)": WHILE,
    },
    "steps/running_alike.py": {"register_forward_pre_hook(compare, prepend=True)": WHILE},
    "steps/update.py": {"optimizer.grad_scale": TORCH, "optimizer.found_inf": TORCH},
}
"""What the files write to things that are not their own, and why each may."""


def _written(tree: ast.Module) -> Iterator[str]:
    """Attributes that are set on anything but ``self``, ``cls`` and autograd's ``ctx``."""
    for node in ast.walk(tree):
        found: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            found = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For):
            found = [node.target]
        elif isinstance(node, ast.Call):
            yield from _written_by(node)
        for target in found:
            items = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
            for item in items:
                is_own = isinstance(item, ast.Attribute) and ast.unparse(item.value) in (
                    "self",
                    "cls",
                    "ctx",
                )
                is_inside = isinstance(item, ast.Subscript) and _is_inside(item.value)
                if (isinstance(item, ast.Attribute) and not is_own) or is_inside:
                    yield ast.unparse(item)


def _is_inside(value: ast.expr) -> bool:
    """Whether a dictionary is an object's own: ``vars(x)``, ``x.__dict__``, ``x._modules``."""
    is_private = isinstance(value, ast.Attribute) and value.attr.startswith("_")
    return ast.unparse(value).startswith("vars(") or (
        is_private and ast.unparse(value.value) not in ("self", "cls")
    )


def _written_by(call: ast.Call) -> Iterator[str]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
    by_name = name in ("setattr", "delattr", "__setattr__", "__delattr__")
    inside = isinstance(call.func, ast.Attribute) and _is_inside(call.func.value)
    changes = inside and name in ("update", "setdefault", "pop", "clear")
    if by_name or changes:
        yield ast.unparse(call)
    elif name.startswith("register_") and name != "register_autograd" and name != "register_fake":
        yield f"{name}({', '.join(map(ast.unparse, [*call.args, *call.keywords]))})"


WRITING = [path for path in FILES if path.parts[-2] == "steps" or "parallel" in path.parts]


@pytest.mark.parametrize("path", WRITING, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_is_planted_on_meshes_modules_and_tensors(path):
    allowed = ASSIGNED.get(str(path.relative_to(PACKAGE)), {})
    found = set(_written(ast.parse(path.read_text())))
    assert found - allowed.keys() == set()
    assert allowed.keys() - found == set(), "allowed and not there any more"


@pytest.mark.parametrize(
    "source",
    [
        "mesh.ep = 2",
        "setattr(mesh, NAME, 2)",
        "model._layout, x = 1, 2",
        "x.known: int = 2",
        "tensor.count += 1",
        "del module.attend",
        "vars(module)['attend'] = f",
        "module.__dict__['attend'] = f",
        "module.__dict__.update(attend=f)",
        "module._modules[name] = f",
        "object.__setattr__(mesh, 'ep', 2)",
        "model.register_buffer('known', x)",
        "for module.known in found: ...",
    ],
)
def test_the_rule_finds_what_is_planted(source):
    assert len(list(_written(ast.parse(source)))) == 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_marks_of_our_own_are_read(path):
    """But the layout, by those that have no state: parallelize leaves it, four read it."""
    tree, name = ast.parse(path.read_text()), str(path.relative_to(PACKAGE))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    texts = {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert not any(text.startswith("_forgekit") for text in texts) or name == "state.py"
    readers = ("generate.py", "lm_eval_harness.py", "huggingface/check_export.py", "adapters.py")
    readers = ("state.py", "steps/dpo.py", *(f"run/{reader}" for reader in readers))
    assert "layout_of" not in names or name in readers
    assert "set_layout" not in names or name in ("state.py", "parallel/parallelize.py")


TORCH_NAMES = {"_unsharded_param", "_fsdp_param_groups", "_step_supports_amp_scaling", "_fields"}


@pytest.mark.parametrize("path", WRITING, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_what_is_looked_for_on_objects_is_public_or_torchs(path):
    tree = ast.parse(path.read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) > 1]
    probed = {
        call.args[1].value
        for call in calls
        if ast.unparse(call.func) in ("getattr", "hasattr")
        and isinstance(call.args[1], ast.Constant)
    }
    private = {text for text in probed if text.startswith("_") and not text.startswith("__")}
    assert private <= TORCH_NAMES
