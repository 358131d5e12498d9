"""The device of the engine's tests: the GPU where torch sees one, else the CPU; CUDA_VISIBLE_DEVICES= hides it.

Tests are written for a CPU. On a GPU the engine moves the model there by itself; what surrounds it is moved here: the
inputs of every forward, and what ranks return. Oracles train on the device, too (oracle.py).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

# Tests that cannot run with tensors on a GPU, by what they do instead: names of tests by file, none for the whole file.
CPU_ONLY = {
    "it brings a device of its own": {
        "core/test_nccl.py": "",
        "core/test_stream_order.py": "",
        "engine/test_no_host_wait.py": "",
        "watchdog/test_watchdog.py": "test_a_gather_that_never_ends_is_named_although_no_thread_waits_in_it",
    },
    "it computes with tensors and modules of its own, which lie on the CPU": {
        "core/test_backward_kinds.py": "test_loop",
        "core/test_casting.py": "",
        "core/test_external_parameters.py": "test_methods_and_wrappers_called_on_their_own_find_what_they_read "
        "test_registering_and_unregistering_after_initialize",
        "core/test_hostile_models.py": "test_model",
        "core/test_param_groups.py": "test_groups_keep_their_settings_and_take_new_ones",
        "core/test_quantized_bases.py": "",
        "core/test_released_parameters.py": "",
        "core/test_same_bits.py": "test_draws_differ_between_steps_micro_batches_and_forwards_and_repeat "
        "test_the_script_keeps_its_own_random_numbers",
        "core/test_two_engines.py": "test_engines_together",
        "engine/test_engine.py": "test_the_elements_that_it_names_are_those_that_the_rank_updates",
        "engine/test_init.py": "test_a_module_attached_later_runs_and_stays_as_it_is "
        "test_rank_0s_numbers_are_everyones "
        "test_weights_are_those_of_plain_construction test_a_later_block_changes_a_model_as_plain_torch_does",
        "engine/test_metrics.py": "test_the_accuracy_over_an_uneven_dataset_is_that_of_one_process",
        "engine/test_transformers.py": "test_generation_between_steps_sees_the_current_weights",
        "engine/test_user_habits.py": "test_memory_that_somebody_was_given_stays_his "
        "test_what_cannot_be_right_is_refused_by_name",
        "engine/test_weights_out.py": "test_what_is_loaded_is_exact",
        "offload/test_offload_failures.py": "test_an_update_that_only_one_rank_still_runs_holds_nobody_up",
        "offload/test_offload_states.py": "test_the_module_computes_while_only_the_optimizers_state_rests",
        "recompute/test_recompute_finds.py": "test_a_recomputation_finds_what_its_forward_found",
        "recompute/test_recompute_memory.py": "test_ranks_that_call_other_modules_choose_alike",
    },
    "it wants the bits of the CPU": {
        "core/test_safe_access.py": "test_gradients_are_the_average_so_far",
        "engine/test_local_sgd.py": "test_two_replicas_train_bit_for_bit_as_plain_torch",
        "engine/test_muon.py": "test_every_stage_and_world_is_torchs_bit_by_bit test_offloaded_state_trains_alike "
        "test_matrices_that_init_has_cut_have_their_true_shapes test_a_torch_muon_of_the_script_runs_on_shards "
        "test_normuon_is_its_paper_and_keeps_a_number_for_each_row",
        "engine/test_precision.py": "test_what_travels_is_rounded_and_sums_are_not "
        "test_gradients_add_up_in_the_dtype_that_was_asked_for "
        "test_gradients_add_up_in_fp32_under_a_boundary_set_by_hand",
    },
    "its ranks would need a GPU each": {
        "engine/test_init.py": "test_it_joins_the_process_group_and_leaves_other_threads_alone",
        "engine/test_nothing_silent.py": "test_a_job_that_calls_initialize_is_not_warned_that_none_does",
    },
    "no thread waits for a GPU's messages, and so nobody sees ranks that wait for each other": {
        "engine/test_unequal_steps.py": "test_a_forward_without_its_backward_is_named_far_before_the_time_out",
    },
    "a GPU's step ends before the host knows what came of it": {
        "engine/test_client_optimizers.py": "test_a_class_of_an_adapter_and_a_scheduler_of_torch",
        "engine/test_log.py": "",
        "engine/test_metrics.py": "test_values_of_the_script_stand_in_the_line_of_the_step",
        "engine/test_nothing_silent.py": "test_step_of_the_returned_optimizer_is_that_of_the_engine "
        "test_losses_that_are_not_finite_are_counted_and_told_of_at_powers_of_ten "
        "test_the_rank_with_such_a_loss_is_named_and_rank_0_speaks",
        "engine/test_overflow.py": "test_one_rank_overflows_and_all_skip test_at_the_minimum_every_rank_says_so",
        "offload/test_offload_numbers.py": "test_what_is_not_finite_is_named",
    },
    "it asks what a CPU, its memory and its messages are used for": {
        "engine/test_engine.py": "test_memory_and_configuration_are_printed",
        "engine/test_init_memory.py": "test_memory_while_a_model_becomes_16_bit "
        "test_memory_while_an_engine_takes_the_model_over",  # gloo sends a copy on the host
        "engine/test_nothing_silent.py": "test_a_job_that_never_calls_initialize_is_warned_of_once",
        "offload/test_host_memory.py": "test_the_log_says_what_the_process_grows_by",
        "offload/test_offload_nvme.py": "test_state_that_no_file_foresaw_is_refused",
        "offload/test_offload_streamed.py": "test_all_ranks_choose_by_the_one_with_the_least_memory "
        "test_nothing_stays_where_host_and_device_share_one_memory "
        "test_auto_takes_what_moves_faster test_ratio_auto_leaves_room_for_what_streams",
        "recompute/test_recompute_memory.py": "test_a_block_keeps_what_its_policy_says",
    },
}
# What the stand-in for a GPU of cuda_emulation/ lacks beyond that.
STAND_IN_LACKS = {
    "pickles": {
        "checkpoint/test_checkpoint_anywhere.py": "test_every_configuration_loads_what_another_saved",
        "core/test_safe_access.py": "test_a_pickled_parameter_leaves_the_engine_behind",
        "engine/test_nothing_silent.py": "test_step_of_the_optimizer_that_was_handed_over_raises_until_the_engine_is_"
        "gone",
        "engine/test_user_habits.py": "test_a_copy_lives_on_its_own",
        "offload/test_offload_contract.py": "test_check_runs_with_state_in_host_memory",
        "recompute/test_recompute.py": "test_nothing_of_the_model_changes",
    },
    "NCCL, pinned memory, generators, or kernels of torch that a CPU has not": {
        "core/test_safe_access.py": "test_an_edit_is_exact_and_the_next_step_begins_there",
        "core/test_steady_memory.py": "test_a_gpus_own_allocator_asks_for_nothing_either",
        "core/test_refusals.py": "test_inference_mode_and_construction "
        "test_what_no_engine_can_train_is_refused_by_name",
        "engine/test_transformers.py": "test_all_stages_have_equal_losses",
        "engine/test_user_habits.py": "test_models_made_of_torch_machinery_give_the_same_bits_on_every_stage",
        "offload/test_host_memory.py": "test_pinned_memory_is_registered_until_it_goes_back",
        "recompute/test_tiled_loss.py": "test_sixteen_bits_on_a_gpu",
    },
}


def why_not_here(name: str) -> str:
    """Why a test, by its name from pytest, cannot run on the device of this process; "" where it can."""
    if not torch.cuda.is_available():
        return ""
    tables = [("", CPU_ONLY)]
    if torch.cuda.get_device_name() == "stand-in for CUDA":
        tables.append(("the stand-in lacks ", STAND_IN_LACKS))
    file, _, test = name.partition("[")[0].removeprefix("tests/").partition("::")
    for begin, table in tables:
        for why, files in table.items():
            if file in files and (not files[file] or test in files[file].split()):
                return f"not with tensors on a GPU: {begin}{why}"
    return ""


def moved(value: Any, device: torch.device) -> Any:
    """The same with all its tensors on a device; as it is where they are there."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)


def on_host(value: Any) -> Any:
    """What a rank returns, where it was computed on a GPU."""
    return moved(value, torch.device("cpu")) if torch.cuda.is_available() else value


def feed() -> None:
    """From here on engines of this process take inputs from the CPU, too, where they are on a GPU.

    And `torch.equal` compares what is on the GPU with what is on the host; not for the product, which must know.
    """
    if not torch.cuda.is_available():
        return
    from zero.engine.engine import Engine

    forward, equal = Engine.forward, torch.equal

    def fed(self: Engine, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *moved(args, self.device), **moved(kwargs, self.device))

    def same(one: torch.Tensor, other: torch.Tensor) -> bool:
        ours = sys._getframe(1).f_globals["__name__"].startswith("zero.")
        return equal(one, other if ours else other.to(one.device))

    Engine.forward = fed  # type: ignore[method-assign]
    torch.equal = same
