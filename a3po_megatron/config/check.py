"""The one validation pass: refuses settings that contradict each other or the model. Changes nothing."""

from a3po_megatron.config.actor import OptimizerConfig
from a3po_megatron.config.check_actor import at_least, check_actor
from a3po_megatron.config.check_algorithm import check_algorithm
from a3po_megatron.config.data import ArithmeticTaskConfig
from a3po_megatron.config.model_shape import ModelShape
from a3po_megatron.config.schema import ModelConfig, PretrainConfig, RunConfig, TrainConfig
from a3po_megatron.errors import UserError

ARITHMETIC_VOCABULARY = 14  # token ids that data/arithmetic.py uses; a test holds the two together


def check_pretrain(config: PretrainConfig, shape: ModelShape) -> None:
    """Check every setting of a pretraining run against the others and the model's shape. Raises UserError."""
    check_run(config.run)
    check_model(config.model)
    check_actor(config.actor, shape)
    check_optimizer(config.optimizer)
    at_least("batch_size", config.batch_size, 1)
    at_least("eval_every", config.eval_every, 0)
    at_least("num_questions", config.num_questions, 1)
    train = check_task(config.task, "task", shape)
    if config.num_questions > train:
        raise UserError(
            f"num_questions={config.num_questions}: the task has {train} training questions "
            f"(task.max_operand={config.task.max_operand}, task.num_heldout={config.task.num_heldout}); take at most {train}"
        )
    if not 0 < config.stop_at_accuracy <= 1:
        raise UserError(f"stop_at_accuracy={config.stop_at_accuracy}: an accuracy above 0 and at most 1")


def check_train(config: TrainConfig, shape: ModelShape) -> None:
    """Check the settings of a reinforcement learning run against each other and the model's shape. Raises UserError.

    Those of controller, rollout, data and reward alone are checked by `check_controller` in controller/build.py, which
    goes first.
    """
    check_run(config.run)
    check_model(config.model)
    check_actor(config.actor, shape)
    check_optimizer(config.optimizer)
    check_algorithm(config.algorithm)
    if not config.advantage.std_floor > 0:
        raise UserError(
            f"advantage.std_floor={config.advantage.std_floor}: the smallest std that is divided by, above 0"
        )
    if config.data.task == "arithmetic":
        check_task(config.data.arithmetic, "data.arithmetic", shape)
    _check_method(config)
    _check_auxiliary_losses(config)
    _check_same_model(config, shape)
    _check_lengths(config, shape)
    if config.run.resume:
        raise UserError(
            "run.resume=true: a reinforcement learning run cannot be resumed yet; start it in a new run.dir"
        )
    _check_publication_time(config)
    if config.actor.world_size > 1 and config.actor.timeout_s < config.rollout.transfer_timeout_s:
        raise UserError(
            f"actor.timeout_s={config.actor.timeout_s} is below rollout.transfer_timeout_s="
            f"{config.rollout.transfer_timeout_s}: the other ranks wait while rank 0 sends weights; make it as long"
        )


def check_task(task: ArithmeticTaskConfig, section: str, shape: ModelShape) -> int:
    """Check the arithmetic task against itself and the model; return the number of training questions."""
    at_least(f"{section}.max_operand", task.max_operand, 1)
    at_least(f"{section}.num_heldout", task.num_heldout, 1)
    questions = (task.max_operand + 1) ** 2
    if task.num_heldout >= questions:
        raise UserError(
            f"{section}.num_heldout={task.num_heldout}: of {questions} questions at most {questions - 1} can be held out"
        )
    if shape.vocab_size < ARITHMETIC_VOCABULARY:
        raise UserError(
            f"model.path: a vocabulary of {shape.vocab_size} tokens; the arithmetic task uses {ARITHMETIC_VOCABULARY}"
        )
    longest = 2 * len(str(task.max_operand)) + 2 + len(str(2 * task.max_operand)) + 1
    if longest > shape.max_position_embeddings:
        raise UserError(
            f"{section}.max_operand={task.max_operand}: questions with answers of {longest} tokens, "
            f"the model has {shape.max_position_embeddings} positions"
        )
    return questions - task.num_heldout


def check_run(run: RunConfig) -> None:
    """Check the run's own numbers."""
    if not run.dir:
        raise UserError("run.dir is empty: name the folder that the run may write")
    at_least("run.seed", run.seed, 0)
    at_least("run.num_steps", run.num_steps, 1)
    for name in ("checkpoint_every", "keep_last", "keep_every"):
        at_least(f"run.{name}", getattr(run, name), 0)
    if run.keep_every and not run.keep_last:
        raise UserError(
            f"run.keep_every={run.keep_every} without run.keep_last: nothing is deleted then; set how many of the newest stay"
        )
    if run.keep_every and (not run.checkpoint_every or run.keep_every % run.checkpoint_every):
        raise UserError(
            f"run.keep_every={run.keep_every} is not a multiple of run.checkpoint_every={run.checkpoint_every}: "
            "no checkpoint is written at its steps"
        )


def check_model(model: ModelConfig) -> None:
    """Check how the weights are initialised."""
    if not model.init_std > 0:
        raise UserError(f"model.init_std={model.init_std}: a standard deviation above 0")


def check_optimizer(optimizer: OptimizerConfig) -> None:
    """Check the optimizer and its learning rate schedule."""
    if not optimizer.lr > 0:
        raise UserError(f"optimizer.lr={optimizer.lr}: a learning rate above 0")
    if not 0 <= optimizer.min_lr <= optimizer.lr:
        raise UserError(f"optimizer.min_lr={optimizer.min_lr}: between 0 and optimizer.lr={optimizer.lr}")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(optimizer, name) < 1:
            raise UserError(f"optimizer.{name}={getattr(optimizer, name)}: at least 0 and below 1")
    if not optimizer.eps > 0:
        raise UserError(f"optimizer.eps={optimizer.eps}: above 0")
    at_least("optimizer.weight_decay", optimizer.weight_decay, 0)
    at_least("optimizer.clip_grad", optimizer.clip_grad, 0)
    at_least("optimizer.lr_warmup_steps", optimizer.lr_warmup_steps, 0)
    if optimizer.lr_decay != "constant" and optimizer.lr_decay_steps <= optimizer.lr_warmup_steps:
        raise UserError(
            f"optimizer.lr_decay_steps={optimizer.lr_decay_steps} with lr_decay={optimizer.lr_decay}: "
            f"must be above optimizer.lr_warmup_steps={optimizer.lr_warmup_steps}, the step at which the decay starts"
        )


def _check_method(config: TrainConfig) -> None:
    algorithm, controller = config.algorithm, config.controller
    synchronous = controller.schedule == "lockstep" and controller.max_staleness == 0
    if algorithm.method == "sync" and not synchronous:
        raise UserError(
            "algorithm.method=sync needs controller.schedule=lockstep and controller.max_staleness=0 (now "
            f"{controller.schedule} and {controller.max_staleness}); for PPO on stale data use algorithm.method=behavior"
        )
    num_samples = controller.prompts_per_batch * controller.samples_per_prompt
    if num_samples < algorithm.num_minibatches:
        raise UserError(
            f"algorithm.num_minibatches={algorithm.num_minibatches}: a batch has only {num_samples} samples "
            f"(controller.prompts_per_batch={controller.prompts_per_batch} x "
            f"controller.samples_per_prompt={controller.samples_per_prompt})"
        )


def _check_auxiliary_losses(config: TrainConfig) -> None:
    actor, aggregation = config.actor, config.algorithm.aggregation
    if (actor.moe_aux_loss_coeff or actor.moe_z_loss_coeff) and aggregation != "token":
        raise UserError(
            f"algorithm.aggregation={aggregation} with actor.moe_aux_loss_coeff={actor.moe_aux_loss_coeff} and "
            f"actor.moe_z_loss_coeff={actor.moe_z_loss_coeff}: megatron-core weighs both losses by tokens, so divided by the "
            "number of sequences they would grow with the responses; use algorithm.aggregation=token, or 0 for both"
        )


def _check_same_model(config: TrainConfig, shape: ModelShape) -> None:
    if config.model.init == "random":
        raise UserError(
            "model.init=random: the rollout servers load the weights of model.path, so the actor must start from them; "
            "use model.init=pretrained (recipes/pretrain.py writes a folder from random weights)"
        )
    if config.rollout.dtype != config.actor.dtype:
        raise UserError(
            f"rollout.dtype={config.rollout.dtype} differs from actor.dtype={config.actor.dtype}: log-probabilities of "
            "fresh tokens would differ between the two from the start; use the same for both"
        )
    if config.rollout.float32_head != config.actor.float32_head:
        raise UserError(
            f"rollout.float32_head={config.rollout.float32_head} differs from actor.float32_head="
            f"{config.actor.float32_head}: one side would round its logits where the other does not; use the same for both"
        )
    tp = config.rollout.tensor_parallel
    if shape.num_attention_heads % tp:
        raise UserError(
            f"rollout.tensor_parallel={tp} does not divide the model's {shape.num_attention_heads} query heads"
        )


def _check_publication_time(config: TrainConfig) -> None:
    limit_s, needed_s = config.controller.publication_timeout_s, config.rollout.publication_timeout_s
    if limit_s < needed_s:
        raise UserError(
            f"controller.publication_timeout_s={limit_s:g}: weights may take {needed_s:g} s to arrive (twice "
            f"rollout.transfer_timeout_s={config.rollout.transfer_timeout_s:g}, and more); make it as long"
        )


def _check_lengths(config: TrainConfig, shape: ModelShape) -> None:
    longest = config.rollout.max_model_len  # check_rollout compares it with rollout.max_response_tokens
    if longest > shape.max_position_embeddings:
        raise UserError(
            f"rollout.max_model_len={longest}: {config.model.path} is made for at most "
            f"{shape.max_position_embeddings} positions (max_position_embeddings)"
        )
    multiple = config.actor.token_multiple
    needed = -(-longest // multiple) * multiple
    if config.actor.max_tokens_per_microbatch < needed:
        raise UserError(
            f"actor.max_tokens_per_microbatch={config.actor.max_tokens_per_microbatch}: a response may reach "
            f"rollout.max_model_len={longest} tokens, which no microbatch could hold; use at least {needed}"
        )
