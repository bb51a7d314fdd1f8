# SPDX-License-Identifier: Apache-2.0
"""vLLM's private surface is still what our adapters were written against.

When this file fails after an upgrade of vLLM, read the names it prints, then
change ``keyformer_vllm/adapters`` (nothing else knows vLLM).
"""

import dataclasses
import importlib
import inspect

import pytest

from keyformer_vllm.adapters import compat


def _resolve(path: str):
    module_name, _, rest = path.partition(":")
    value = importlib.import_module(module_name)
    for part in rest.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("name", sorted(compat._NAMES))
def test_every_name_we_import_exists(name):
    assert getattr(compat, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no vLLM name 'Nonsense'"):
        _ = compat.Nonsense


SIGNATURES = {
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": ["self", "throttle_prefills"],
    "vllm.v1.core.sched.scheduler:Scheduler.add_request": ["self", "request"],
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": [
        "self",
        "scheduler_output",
        "model_runner_output",
    ],
    "vllm.v1.core.sched.scheduler:Scheduler.make_stats": [
        "self",
        "spec_decoding_stats",
        "kv_connector_stats",
        "cudagraph_stats",
        "perf_stats",
        "ec_connector_stats",
    ],
    "vllm.v1.metrics.loggers:AggregateStatLoggerBase.record": [
        "self",
        "scheduler_stats",
        "iteration_stats",
        "mm_cache_stats",
        "engine_idx",
    ],
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens": [
        "self",
        "grammar_output",
    ],
    "vllm.v1.core.sched.scheduler:Scheduler._preempt_request": [
        "self",
        "request",
        "timestamp",
        "drop_stale_output",
    ],
    "vllm.v1.core.sched.scheduler:Scheduler._free_request": [
        "self",
        "request",
        "delay_free_blocks",
    ],
    "vllm.v1.core.single_type_kv_cache_manager:"
    "FullAttentionManager._remove_blocks_in_range": [
        "self",
        "request_id",
        "first_block",
        "last_block",
    ],
    "vllm.v1.core.sched.scheduler:Scheduler._get_local_prefix_cache_hit": [
        "self",
        "request",
    ],
    "vllm.v1.core.kv_cache_manager:KVCacheManager.truncate_computed_blocks": [
        "self",
        "blocks",
        "num_computed_tokens",
    ],
    "vllm.v1.core.single_type_kv_cache_manager:"
    "FullAttentionManager.get_num_blocks_to_allocate": [
        "self",
        "request_id",
        "num_tokens",
        "new_computed_blocks",
        "total_computed_tokens",
        "num_local_computed_tokens",
        "num_tokens_main_model",
        "apply_admission_cap",
        "prefill_end",
    ],
    "vllm.v1.core.single_type_kv_cache_manager:"
    "FullAttentionManager.add_local_computed_blocks": [
        "self",
        "request_id",
        "new_computed_blocks",
        "num_local_computed_tokens",
        "num_external_computed_tokens",
    ],
    "vllm.v1.core.single_type_kv_cache_manager:"
    "FullAttentionManager.allocate_new_blocks": [
        "self",
        "request_id",
        "num_tokens",
        "num_tokens_main_model",
    ],
    "vllm.v1.core.single_type_kv_cache_manager:"
    "FullAttentionManager.pop_blocks_for_free": ["self", "request_id"],
    "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.cache_blocks": [
        "self",
        "request",
        "num_tokens",
        "retention_interval",
        "replay_boundaries",
    ],
    "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.new_step_starts": [
        "self"
    ],
    "vllm.v1.core.block_pool:BlockPool.get_new_blocks": ["self", "num_blocks"],
    "vllm.v1.core.block_pool:BlockPool.free_blocks": ["self", "ordered_blocks"],
    "vllm.v1.core.block_pool:BlockPool.evict_blocks": ["self", "block_ids"],
    "vllm.v1.core.block_pool:BlockPool.move_block_hashes": [
        "self",
        "src_block",
        "dst_block",
    ],
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.register": [
        "kvcache_spec_cls",
        "manager_class",
        "uniform_type_base_spec",
    ],
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder.build": [
        "self",
        "common_prefix_len",
        "common_attn_metadata",
        "fast_build",
    ],
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward": [
        "self",
        "layer",
        "query",
        "key",
        "value",
        "kv_cache",
        "attn_metadata",
        "output",
        "output_scale",
        "output_block_scale",
    ],
    **{
        f"vllm.v1.attention.backends.{name}MetadataBuilder.build": [
            "self",
            "common_prefix_len",
            "common_attn_metadata",
            "fast_build",
        ]
        for name in ("flash_attn:FlashAttention", "triton_attn:TritonAttention")
    },
    **{
        f"vllm.v1.attention.backends.{name}Impl.forward": [
            "self",
            "layer",
            "query",
            "key",
            "value",
            "kv_cache",
            "attn_metadata",
            "output",
            "output_scale",
            "output_block_scale",
        ]
        for name in ("flash_attn:FlashAttention", "triton_attn:TritonAttention")
    },
    **{
        f"vllm.v1.attention.backends.{name}Impl.do_kv_cache_update": [
            "self",
            "layer",
            "key",
            "value",
            "kv_cache",
            "slot_mapping",
        ]
        for name in ("flash_attn:FlashAttention", "triton_attn:TritonAttention")
    },
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model": [
        "self",
        "scheduler_output",
        "intermediate_tensors",
        "dummy_run",
        "skip_attn_for_dummy_run",
        "is_profile",
        "context_len",
        "valid_dummy_state_slots",
        "randomize_inputs",
    ],
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample_tokens": [
        "self",
        "grammar_output",
    ],
    "vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model": ["self"],
    "vllm.v1.worker.gpu_worker:Worker.initialize_from_config": [
        "self",
        "kv_cache_config",
    ],
    "vllm.v1.worker.gpu_worker:Worker.determine_available_memory": ["self"],
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend.customize_spec": ["spec"],
    "vllm.v1.attention.backends.cpu_attn:_get_attn_isa": [
        "dtype",
        "block_size",
        "head_size",
        "kv_cache_dtype",
    ],
    "vllm.v1.worker.cpu_worker:CPUWorker.determine_available_memory": ["self"],
    "vllm.v1.worker.cpu_worker:CPUWorker.init_device": ["self"],
    "vllm.v1.worker.cpu_worker:CPUWorker.initialize_from_config": [
        "self",
        "kv_cache_config",
    ],
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model": [
        "self",
        "scheduler_output",
        "intermediate_tensors",
    ],
    "vllm._custom_ops:cpu_attn_reshape_and_cache": [
        "key",
        "value",
        "key_cache",
        "value_cache",
        "slot_mapping",
        "isa",
        "k_scale",
        "v_scale",
        "kv_cache_dtype",
    ],
    "vllm.engine.arg_utils:EngineArgs.add_cli_args": ["parser"],
    "vllm.engine.arg_utils:EngineArgs.from_cli_args": ["args"],
    "vllm.engine.arg_utils:EngineArgs.create_engine_config": [
        "self",
        "usage_context",
        "headless",
    ],
    "vllm.v1.engine.input_processor:InputProcessor._validate_params": [
        "self",
        "params",
        "supported_tasks",
    ],
}


@pytest.mark.parametrize("path", sorted(SIGNATURES))
def test_signature_of_what_we_override_or_call(path):
    parameters = list(inspect.signature(_resolve(path)).parameters)
    assert parameters == SIGNATURES[path]


FIELDS = {
    "vllm.v1.core.sched.output:SchedulerOutput": {
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "num_scheduled_tokens",
        "finished_req_ids",
        "preempted_req_ids",
    },
    "vllm.v1.core.sched.output:NewRequestData": {"req_id", "num_computed_tokens"},
    "vllm.v1.core.sched.output:CachedRequestData": {"req_ids", "num_computed_tokens"},
    "vllm.v1.attention.backend:CommonAttentionMetadata": {
        "query_start_loc",
        "query_start_loc_cpu",
        "seq_lens",
        "seq_lens_cpu_upper_bound",
        "num_reqs",
        "num_actual_tokens",
        "max_seq_len",
        "max_query_len",
        "req_idx",
        "block_table_tensor",
        "slot_mapping",
        "positions",
        "_num_computed_tokens_cache",
    },
    "vllm.v1.kv_cache_interface:FullAttentionSpec": {
        "page_size_padded",
        "num_head_slots",
        "state_content_bytes",
        "sliding_window",
        "attention_chunk_size",
        "non_causal",
        "head_size_v",
    },
    "vllm.v1.metrics.stats:SchedulerStats": {"num_kv_fetch_reqs_by_stage"},
    "vllm.v1.core.kv_cache_utils:KVCacheBlock": {
        "block_id",
        "ref_cnt",
        "is_null",
        "_block_hash",
    },
}


@pytest.mark.parametrize("path", sorted(FIELDS))
def test_fields_we_read_or_set(path):
    present = {field.name for field in dataclasses.fields(_resolve(path))}
    assert FIELDS[path] <= present, FIELDS[path] - present


SOURCES = {
    # What we reach for on instances shows only in the source.
    "vllm.v1.core.sched.scheduler:Scheduler": (
        "self.running",
        # Hits come after all evictions of a step, and blocks are given with them.
        "self.kv_cache_manager.new_step_starts()",
        ") = self._get_local_prefix_cache_hit(request)",
        "self.reset_preempted_req_ids.add(request.request_id)",
        "request.is_prefill_chunk = request.num_computed_tokens < (",
        "self.finished_req_ids",
        "request.num_in_flight_tokens -= num_tokens_scheduled",
        # What _free_request returns first ends up in the last output.
        "kv_transfer_params, ec_transfer_params = self._free_request(request)",
        "kv_transfer_params=kv_transfer_params,",
        "num_kv_fetch_reqs_by_stage=self._kv_fetch_counts.copy()",
    ),
    "vllm.v1.metrics.loggers:StatLoggerManager": (
        "self.stat_loggers: list[AggregateStatLoggerBase] = []",
        "self.engine_indexes = ",
        "for stat_logger in self.stat_loggers:",
    ),
    # Ids that tell streamed completions and chat, which carry no report.
    "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion": ('f"cmpl-{',),
    "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat": (
        'f"chatcmpl-{',
    ),
    # How heads are shared out, and what ranks talk through.
    "vllm.model_executor.layers.linear:QKVParallelLinear": (
        "self.num_heads = divide(self.total_num_heads, tp_size)",
        "self.num_kv_head_replicas = divide(tp_size, self.total_num_kv_heads)",
    ),
    "vllm.config.model_arch:ModelArchitectureConfig": ("total_num_attention_heads",),
    "vllm.distributed.parallel_state:GroupCoordinator": (
        "rank_in_group: int",
        "cpu_group: ProcessGroup",
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": (
        "self.input_batch.req_ids",
        "self.attn_groups",
    ),
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": (
        "self.req_states",
        "self.attn_groups",
    ),
    "vllm.v1.worker.gpu.states:RequestState": ("self.index_to_req_id",),
    "vllm.v1.worker.gpu.async_utils:AsyncOutput": (
        "self.model_runner_output = model_runner_output",
    ),
    "vllm.v1.worker.gpu_model_runner:AsyncGPUModelRunnerOutput": (
        "self._model_runner_output = model_runner_output",
    ),
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder": (
        "layer.isa = self.isa",
    ),
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator": (
        "self.single_type_managers",
    ),
    "vllm.platforms.cpu:CpuPlatform": ("AttentionBackendEnum.CPU_ATTN",),
}


@pytest.mark.parametrize("path", sorted(SOURCES))
def test_instance_attributes_we_reach_for(path):
    source = inspect.getsource(_resolve(path))
    missing = [text for text in SOURCES[path] if text not in source]
    assert not missing


def test_counts_travel_with_a_worker_s_output_and_a_scheduler_s_statistics():
    import pickle

    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    counts = {"keyformer:freed_blocks": 3}
    output = ModelRunnerOutput([], {})
    compat.attach_step_counts(output, counts)
    arrived = pickle.loads(pickle.dumps(output))
    assert compat.take_step_counts(arrived) == counts
    assert compat.take_step_counts(arrived) == {}
    stats = SchedulerStats(num_kv_fetch_reqs_by_stage={"in_progress": 0})
    compat.attach_step_counts(stats, counts)
    sent = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))
    arrived = MsgpackDecoder(EngineCoreOutputs).decode(sent).scheduler_stats
    assert compat.take_step_counts(arrived) == counts
    assert arrived.num_kv_fetch_reqs_by_stage == {"in_progress": 0}
    with pytest.raises(AssertionError, match="is shared"):
        compat.attach_step_counts(compat.EMPTY_MODEL_RUNNER_OUTPUT, counts)


def test_scheduler_output_takes_our_plan_through_pickling():
    import pickle

    from vllm.v1.core.sched.output import SchedulerOutput

    from keyformer_vllm.adapters.plan import PLAN_ATTRIBUTE, StepPlan, plan_of

    output = SchedulerOutput.make_empty()
    with pytest.raises(RuntimeError, match="sent no eviction plan"):
        plan_of(output)
    setattr(output, PLAN_ATTRIBUTE, StepPlan())
    assert plan_of(pickle.loads(pickle.dumps(output))) == StepPlan()
