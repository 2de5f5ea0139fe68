"""What users write in Python, and the words that the error must hold.

There are `model`, two layers 8 -> 6 -> 4, `conv`, a convolution, `backward()`, and `sgd`, an optimizer of the model.
"""

CALLS = (
    ("compose(model, 'soap')", "recipe: a name, path, mapping, list of stages or Recipe is required, got Sequential"),
    ("compose(Momentum, model)", "recipe: a name, path, mapping, list of stages or Recipe is required, got"),
    ("compose([Momentum], model)", "update.0: a stage is required: an instance"),
    ("compose('soap', model, learning_rate=1)", "unexpected keyword argument 'learning_rate'"),
    ("compose('soap', model, betas=(0.9, 0.95))", "unexpected keyword argument 'betas'"),
    ("compose('soap', model, lr='x')", "lr: a number is required, got 'x'"),
    ("compose('soap', model, weight_decay='x')", "weight_decay: a number is required, got 'x'"),
    ("compose('SOAP', model)", "recipe 'SOAP': a shipped recipe or the path / did you mean 'soap'?"),
    ("compose('Adam', model)", "did you mean 'adam'?"),
    ("compose('soap', model, overrides={'refresh.steps': 1})", "did you mean 'update.eigenbasis.refresh'?"),
    ("compose('soap', model, overrides={'update.eigenbasis.refresh.steps': '1'})", "a valid integer, got '1'"),
    ("compose('soap', model, overrides=3)", "overrides: a mapping {path: value} or strings path.to.field=value"),
    ("compose('soap', model.parameters())", "params: names are required, because routes.adam of the recipe takes"),
    ("compose('adamw', model.state_dict())", "can only optimize Tensors, but one of the params is str"),
    ("compose('soap', nn.Sequential())", "compose: a model with trainable parameters is required, got none"),
    ("compose('soap', nn.LazyLinear(3))", "weight: a parameter with a shape is required, got a lazy one; call the"),
    ("compose('soap', nn.Linear(3, 3, device='meta')).step()", "weight: a parameter with values is required, got one"),
    ("compose('soap', model.requires_grad_(False))", "compose: a model with trainable parameters is required"),
    (
        "compose({'update': [{'kind': 'shampoo', 'solver': 'newton_db'}], 'view': {'kind': 'whole'}}, conv)",
        "update.shampoo.exponent: newton_db takes exponents 1/2 and 1/4, got 1/8; set another `exponent` for blocks of",
    ),
    (
        "compose({'base': 'soap', 'expect': {'eigenbasis': '== 9 tensors'}}, model)",
        "expect.eigenbasis: == 9 tensors is",
    ),
    ("compose({'base': 'sgd', 'sam': {'rho': 0.1}}, model).step()", "a closure is required by `sam`"),
    ("compose({'base': 'sgd', 'line_search': {}}, model).step()", "a closure is required by `line_search`"),
    ("compose('soap', None)", "params: tensors, (name, tensor) pairs or groups are required, got None"),
    (
        "compose('soap', model.named_parameters)",
        "params: tensors, (name, tensor) pairs or groups are required, got",
    ),
    ("compose('soap', model.named_modules())", "can only optimize Tensors, but one of the params is"),
    ("Optimizer(None)", "params: tensors, (name, tensor) pairs or groups are required, got None"),
    ("sgd.add_param_group(conv[0].weight)", "param group: a mapping with 'params' is required, got a Parameter"),
    ("sgd.add_param_group({})", "param group: a mapping with 'params' is required, got the keys []"),
    ("sgd.step(3)", "Optimizer.step: a function that returns the loss is required as closure, got 3"),
    ("sgd.load_state_dict('file.pt')", "is required, got a str; torch.load reads it from a file"),
    ("sgd.load_state_dict(None)", "state_dict: a mapping with 'state' and 'param_groups' is required, got a None"),
    (
        "sgd.state[model[0].weight].update(step=-1) or sgd.state_dict()",
        "optimizer.state: values of the keys, shapes and dtypes that the optimizer has made are required / 'step'",
    ),
    ("Optimizer(model)", "params: parameters are required, got a module; use eigengraft.compose(recipe, model)"),
    ("Optimizer('soap', model.parameters())", "recipe: a name, path, mapping, list of stages or Recipe is required"),
    ("Optimizer(model.parameters(), 'soap')", "params: names are required / pass model.named_parameters()"),
    ("Optimizer([nn.Linear(2, 2)], 'sgd')", "can only optimize Tensors"),
    (
        "Optimizer([{'params': [*model.parameters()], 'momentum': 0.9}], 'sgd')",
        "the keys are params, lr and",
    ),
    ("Optimizer([{'param': [*model.parameters()]}], 'sgd')", "got 'param', did you mean 'params'?"),
    ("Optimizer([*model.parameters()] * 2, 'sgd')", "params: each parameter once is required, got parameter 0 again"),
    (
        "Optimizer([('w', torch.ones(2, 2, dtype=torch.cfloat, requires_grad=True))], 'soap')",
        "w: / complex / update.eigenbasis",
    ),
    ("Optimizer(model.parameters(), lr=-1)", "lr: a finite number >= 0 is required, got -1.0"),
    ("Optimizer(model.parameters(), weight_decay=float('inf'))", "weight_decay: a finite number >= 0 is required"),
    ("sgd.load_state_dict({})", "state_dict: a mapping with 'state' and 'param_groups' is required, got a dict"),
    ("sgd.load_state_dict(model.state_dict())", "state_dict: a mapping with 'state' and 'param_groups' is required"),
    ("sgd.load_state_dict(compose('adamw', model).state_dict())", "state_dict was saved by another recipe"),
    ("sgd.load_state_dict(compose('sgd', nn.Linear(3, 3)).state_dict())", "parameters are missing: '0.weight'"),
    ("sgd.provide('losss', 3.0)", "provide: a registered signal is required (activation_gram"),
    ("backward() or sgd.param_groups[0].update(lr=-1.0) or sgd.step()", "lr: a finite number >= 0 is required"),
    (
        "backward() or sgd.param_groups[0]['params'].append(conv[0].weight) or sgd.step()",
        "4 parameters are required, got",
    ),
    ("backward() or sgd.param_groups[0]['params'].clear() or sgd.step()", "4 parameters are required, got 0"),
    (
        "backward() or sgd.step() or sgd.zero_grad() or model.double() and sgd.step()",
        "0.weight: / (6, 8) in torch.float32, got (6, 8) in torch.float64",
    ),
    ("backward() or sgd.step() or sgd.zero_grad() or model.half() and sgd.state_dict()", "0.weight: / torch.float16"),
    (
        "setattr(model[0].bias, 'data', torch.ones(1)) or backward() or sgd.step()",
        "0.bias: / (6,) in torch.float32, got (1,)",
    ),
    ("backward() or Optimizer([('w', model[0].weight)], 'newton_muon').step()", "the signal 'activation_gram' is"),
    ("backward() or Optimizer(model.named_parameters(), 'muonclip').step()", "the signal 'max_logit' is required"),
    (
        "backward() or compose('sophia', model).step()",
        "update.diagonal_newton: the signal 'hessian_diagonal' is / first",
    ),
    ("eigengraft.watch_inputs(sgd, model.parameters())", "watch_inputs: a model, an nn.Module, is required, got gener"),
    ("eigengraft.watch_inputs(model, sgd)", "watch_inputs: an eigengraft.Optimizer is required first, got Sequential"),
    ("eigengraft.watch_output_gradients(sgd, None)", "watch_output_gradients: a model, an nn.Module, is required, got"),
    ("eigengraft.watch_logits(sgd, 'model')", "watch_logits: a model, an nn.Module, is required, got 'model'"),
    (
        "eigengraft.hutchinson(torch.optim.SGD(model.parameters(), 0.1), model)",
        "hutchinson: an eigengraft.Optimizer is required first, got SGD",
    ),
    (
        "eigengraft.hutchinson(sgd, model(torch.ones(2, 8)).sum())",
        "hutchinson: a function that returns the loss is required as loss, got Tensor",
    ),
    ("eigengraft.hutchinson(sgd, model, samples=1.5)", "hutchinson: an integer is required as samples, got 1.5"),
    (
        "eigengraft.hutchinson(compose('sophia', model), lambda: model(torch.ones(2, 8)))",
        "hutchinson: one number is required from the function loss, got shape (2, 4)",
    ),
    (
        "eigengraft.hutchinson(compose('sophia', model), lambda: (model(torch.ones(2, 8)).sum(), None))",
        "hutchinson: a tensor is required from the function loss, got tuple",
    ),
    (
        "eigengraft.hutchinson(compose('sophia', model), lambda: model(torch.ones(2, 8)).sum().detach())",
        "hutchinson: a loss that depends on parameters is required, got one without a gradient",
    ),
    (
        "eigengraft.gauss_newton_bartlett(compose('sophia', model), lambda: conv(torch.ones(2, 4, 4)).sum(), 2)",
        "a loss that depends on parameters of the optimizer is required, got one that depends on none of 0.weight, 0.b",
    ),
    ("eigengraft.gauss_newton_bartlett(sgd, 3, 2)", "a function that returns the loss is required as loss, got 3"),
    ("eigengraft.gauss_newton_bartlett(sgd, model, '2')", "bartlett: an integer is required as count, got '2'"),
    ("eigengraft.gauss_newton_bartlett(sgd, model, 0)", "bartlett: a count of at least 1 is required, got 0"),
    ("load_recipe('soap', ['update.rms.beta=0.9'])", "there is no 'rms' in 'update' (there are: eigenbasis)"),
    ("load_recipe('soap', {'': 1})", "overrides: the path of a field is required for every value, got ''"),
    ("load_recipe('soap.yml')", "soap.yml: an existing YAML file is required"),
    ("load_recipe('')", "recipe '': a shipped recipe or the path of a .yaml file is required"),
    ("load_recipe('soap').replace(lrr=1)", "lrr / unknown field (did you mean 'lr'?)"),
    ("load_recipe('soap').replace(lr=-1)", "lr / greater than or equal to 0"),
    (
        "compose({'base': 'soap', 'storage': {'update.eigenbasis.inner.rms': {'kind': 'orthogonal'}}}, model)",
        "storage.update.eigenbasis.inner.rms: slots of role basis are required by orthogonal, got second_moment",
    ),
    ("Momentum(0.9)", "Momentum: fields are given by name, e.g. Momentum(beta=...), got 0.9"),
    ("eigengraft.Recipe('soap')", "Recipe: fields are given by name, e.g. Recipe("),
    ("Momentum(beta=2)", "beta / less than 1"),
    ("Momentum(bta=0.9)", "bta / unknown field (did you mean 'beta'?)"),
    ("eigengraft.SOAP(model.parameters())", "has no attribute 'SOAP'; recipes are names: eigengraft.compose('soap'"),
)

WARNINGS: tuple[tuple[str, str], ...] = (
    (
        "[sgd.param_groups[0].update(amsgrad=True), sgd.step()]",
        "param group: 'amsgrad' has no effect on steps; the recipe says it",
    ),
    (
        "[adamw.param_groups[0].update(beta=0.5), adamw.step()]",
        "param group: 'beta' has no effect on steps; update.momentum.beta, update.rms.beta of the recipe says it",
    ),
)
"""What goes on as before, with a warning."""
