"""What breaks for users of other kernels and trainers, and where it is proved that it does not break here.

    python tests/repository/needs.py    # writes tests/README.md

test_needs.py checks that everything named here exists and that the page is current."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS / "README.md"

#: Threads are named as on their project's page, with these for the projects that come up most.
PROJECTS = {
    "trl": "huggingface/trl",
    "liger": "linkedin/Liger-Kernel",
    "verl": "verl-project/verl",
    "unsloth": "unslothai/unsloth",
    "unsloth-zoo": "unslothai/unsloth-zoo",
    "prime-rl": "PrimeIntellect-ai/prime-rl",
    "nemo-rl": "NVIDIA-NeMo/RL",
    "ms-swift": "modelscope/ms-swift",
    "cce": "apple/ml-cross-entropy",
    "te": "NVIDIA/TransformerEngine",
    "slime": "THUDM/slime",
    "areal": "areal-project/AReaL",
}


@dataclass(frozen=True)
class Need:
    """`proof` and `gpu` name tests as file::test, files of any folder here without their suffix; a file alone stands for all in it.
    `says` quotes the documentation, (file, sentence), where something is a limit by design."""

    breaks: str
    seen: str
    proof: str
    gpu: str = ""
    says: tuple[tuple[str, str], ...] = ()


NEEDS = [
    # ---- training goes wrong without a word
    Need(
        "A fused loss is a second copy of a trainer's formulas, and drifts from it",
        "liger#1082 trl#4975 trl#7009 trl#6637 unsloth-zoo#890 prime-rl#858",
        """
        test_parity_trl::test_every_combination test_parity_trl::test_the_grid_is_not_trivial
        test_parity_verl::test_every_policy_loss test_parity_verl::test_the_grid_is_not_trivial
        test_parity_liger::test_every_combination test_parity_liger::test_triton_loss
        test_integration_trl::test_options test_integration_trl::test_mixture_of_experts
        test_grpo_loss::test_custom_surrogate test_bad_input::test_unknown_keywords
        """,
    ),
    Need(
        "A denominator of one micro-batch or one rank, where that of the step is meant",
        "trl#5619 trl#5890 trl#7206 verl#7200 verl#7321 ms-swift#10117 prime-rl#2359 NovaSky-AI/SkyRL#1296",
        """
        test_needs_ranks::test_micro_batches_of_one_rank test_needs_ranks::test_micro_batches_of_two_ranks
        test_grpo_loss::test_micro_batches_add_up test_linear_grpo_loss::test_micro_batches_add_up
        test_distributed::test_micro_batches_add_up test_distributed::test_ranks_add_up
        """,
        says=(("docs/numerics.md", "Pass the denominator over all micro-batches and ranks; no hidden mean, no collective."),),
    ),
    Need(
        "A vocabulary that is no multiple of the tile: log-probs above 0",
        "verl#2656 verl#2899 unsloth#10616 cce#59",
        """
        test_needs_inputs::test_vocabularies_of_real_models test_token_logprobs::test_probabilities_sum_to_one
        test_token_logprobs::test_large_odd_vocabularies triton_recipes::test_an_objective_is_what_its_paper_says
        """,
        gpu="triton_recipes::test_pairs triton_recipes::test_an_objective_is_what_its_paper_says",
    ),
    Need(
        "A running maximum that starts at 0, absent lanes that count as 0",
        "verl#7439 NovaSky-AI/SkyRL#2141",
        """
        test_token_logprobs::test_shifted_logits test_token_logprobs::test_scattered_minus_infinity
        test_token_logprobs::test_row_of_only_minus_infinity_is_nan test_row_kernels::test_hard_rows test_two_row_kernels::test_parts_of_rows_merge
        """,
        gpu="test_row_kernels::test_hard_rows",
        says=(("grpo_kernels/logprobs.py", "A row of only -inf gives NaN, as torch.log_softmax does."),),
    ),
    Need(
        "Strided logits, ids or upstream gradients read at the wrong place",
        "verl#6960 te#2734 unsloth#10713",
        """
        test_token_logprobs::test_strided_logits test_token_logprobs::test_vocabulary_with_a_stride
        test_token_logprobs::test_other_layouts_of_small_tensors test_grpo_loss_autograd::test_strided_inputs
        test_grpo_loss_autograd::test_expanded_logits test_linear_engine::test_strided_inputs test_row_kernels::test_where_rows_lie
        """,
    ),
    Need(
        "Only the first element of the upstream gradient is used",
        "liger#678 liger#968",
        """
        test_token_logprobs::test_matches_float64 test_linear_logprobs::test_matches_float64
        test_grpo_loss_autograd::test_upstream_scalar test_linear_engine::test_upstream_scalar
        """,
    ),
    Need(
        "The gradient is written into the caller's logits",
        "liger#272 liger#343 liger#1251 unsloth#5002 te#3193",
        """
        test_token_logprobs_autograd::test_inputs_are_not_modified test_grpo_loss_autograd::test_inputs_are_not_modified
        test_linear_engine::test_inputs_are_not_modified test_token_logprobs_autograd::test_two_heads_on_the_same_logits
        test_token_logprobs_autograd::test_second_backward_and_accumulation
        test_grpo_loss_autograd::test_second_backward_is_right_or_refused
        test_grpo_loss_autograd::test_overwritten_logits_cannot_be_trained_on
        test_linear_engine::test_activation_checkpointing test_needs_inputs::test_a_loss_under_activation_checkpointing
        """,
        says=(("grpo_kernels/losses.py", "The gradient is handed over once: a second backward raises RuntimeError"),),
    ),
    Need(
        "Shards of a sequence and packed sequences: labels that belong to another token",
        "verl#3512 verl#3723 verl#6068 axolotl-ai-cloud/axolotl#2659 prime-rl#1540",
        """
        test_context_parallel::test_on_ranks test_context_parallel::test_shift_never_crosses_a_sequence
        test_context_parallel::test_shift_of_padded_ids test_linear_logprobs::test_layouts_agree
        """,
        says=(("grpo_kernels/batch.py", "Row i of the logits (or hidden states) predicts targets[i]; nothing is shifted."),),
    ),
    Need(
        "A LoRA on the head is left out, or the head is frozen",
        "trl#4612 trl#5977 trl#7017",
        """
        test_needs_heads::test_an_adapter_on_the_head_is_refused_however_it_was_named
        test_needs_heads::test_adapters_in_the_body_get_the_gradients_of_the_unfused_head
        test_head::test_heads_that_are_refused test_integration_trl::test_lora
        test_integration_trl::test_lora_on_the_head_is_refused test_integration_trl::test_other_heads_are_refused
        """,
        says=(
            (
                "grpo_kernels/integrations/README.md",
                "Refused, by inspection: LoRA or any other adapter around the head, quantised, parametrised, hooked, patched",
            ),
        ),
    ),
    Need(
        "Scale or softcap of the logits dropped, or in the wrong order",
        "unsloth-zoo#593 unsloth#11277 trl#6629 trl#5691 ServiceNow/Fast-LLM#228",
        """
        test_linear_models::test_equals_the_models_own_forward test_linear_models::test_the_transform_matters
        test_needs_heads::test_installed_heads_give_the_models_own_log_probs test_grpo_loss::test_transform_matches_oracle
        test_linear_grpo_loss::test_transform_matches_oracle test_trainer::test_linear_loss_refuses_a_head_it_does_not_know
        """,
    ),
    Need(
        "The temperature applied twice, never, to log-probs, or not to the entropy",
        "trl#3029 trl#4159 slime#557 ms-swift#8427 OpenRLHF/OpenRLHF#1319 verl#6110",
        """
        test_token_logprobs::test_temperature_equals_dividing_the_logits test_token_logprobs::test_temperature_kinds
        test_batch::test_temperature_of_rows test_bad_input::test_value_error test_row_kernels::test_values_and_gradients
        """,
    ),
    Need(
        "The gradient of the entropy dropped or wrong",
        "trl#6625 trl#7125 NovaSky-AI/SkyRL#1765",
        """
        test_token_logprobs::test_matches_float64 test_linear_logprobs::test_matches_float64
        test_token_logprobs_autograd::test_unused_outputs test_token_logprobs_autograd::test_entropy_options
        """,
    ),
    Need(
        "The head's weight read as an attribute: hooks of DDP, FSDP and ZeRO-3 do not fire",
        "trl#7245 trl#7246 trl#3368 trl#6372 verl#7520 verl#7427",
        """
        test_head_ranks::test_on_two_ranks test_head::test_a_weight_that_is_only_there_in_between
        test_head::test_accelerate_offloading test_linear_bad_input::test_value_error
        test_integration_trl_distributed::test_gradients_are_those_of_one_process
        test_integration_trl_distributed::test_runs_under_ddp
        """,
    ),
    Need(
        "DTensors mixed with tensors",
        "trl#6065 meta-pytorch/torchtune#2898 liger#332 hiyouga/LlamaFactory#5941",
        """
        test_needs_inputs::test_replicated_dtensors_in_every_combination test_linear_bad_input::test_replicated_dtensor
        test_linear_bad_input::test_sharded_dtensor
        """,
    ),
    Need(
        "NaN in gradients from positions that are masked",
        "nemo-rl#4120 MakazhanAlpamys/Soup#342 OpenRLHF/OpenRLHF#1293",
        """
        test_token_logprobs::test_masked_rows_may_hold_anything test_grpo_loss_autograd::test_masked_rows_may_hold_anything
        test_linear_logprobs::test_masked_rows_may_hold_anything test_linear_grpo_loss::test_masked_rows_may_hold_anything
        test_corrections::test_what_is_masked_has_no_effect
        test_row_kernels::test_rows_that_are_not_read
        """,
    ),
    Need(
        "The KL overflows at a token that moved far",
        "trl#3015 OpenRLHF/OpenRLHF#1335",
        """
        test_kl::test_huge_log_ratios_are_finite test_token_stage::test_huge_log_ratios_are_finite
        test_grpo_loss_autograd::test_huge_log_ratios_stay_finite
        test_grpo_loss_autograd::test_metrics_of_huge_log_ratios_are_finite
        """,
        says=(("docs/numerics.md", "Ratios are bounded at e^60 and keep their slope there"),),
    ),
    Need(
        "The sampler renormalises over top-p or top-k, the trainer does not",
        "trl#6789 trl#6944 ms-swift#8442 prime-rl#3235 vllm-project/vllm#49577",
        """
        test_needs_inputs::test_log_probs_over_the_kept_set_of_a_sampler test_token_logprobs::test_scattered_minus_infinity
        test_integration_slime::test_slime_functions_of_logits
        test_integration_slime::test_slime_record_goes_to_the_rows_as_it_is test_kept::test_hidden_states_match_oracle
        test_integration_prime_rl::test_prime_rl_replays_sampling_masks
        test_integration_trl_replay::test_log_probs_ratio_and_gradient
        """,
    ),
    Need(
        "Logits or log-probs rounded to bf16",
        "liger#672 trl#7084 trl#4303 nemo-rl#4096 prime-rl#2438 sgl-project/sglang#33627",
        """
        test_linear_logprobs::test_matches_float64 test_linear_grpo_loss::test_equals_the_loss_of_fp32_logits
        test_linear_grpo_loss::test_mixed_dtypes test_cpu_products::test_the_result_is_not_rounded_to_bf16
        test_token_logprobs::test_peaked_rows
        """,
        gpu="triton_recipes::test_products triton_recipes::test_pairs",
    ),
    Need(
        "The gradient of the weight summed in bf16 over chunks",
        "liger#1391 liger#1454 cce#14 allenai/OLMo-core#370 axolotl-ai-cloud/axolotl#1601",
        "test_linear_engine::test_chunk_count_changes_only_rounding test_cpu_products::test_d_weight",
        gpu="triton_recipes::test_products triton_recipes::test_pairs",
    ),
    Need(
        "The log-prob of a token depends on its batch",
        "verl#6280 RLinf/RLinf#1534 nemo-rl#4039 vllm-project/vllm#42259",
        """
        test_determinism::test_a_row_depends_on_no_other test_determinism::test_threads_change_no_bit
        test_determinism::test_triton_rows_depend_on_no_other
        test_determinism::test_with_our_products_a_row_depends_on_no_other
        test_determinism::test_from_hidden_states_a_call_gives_the_same_bits_again
        test_linear_engine::test_chunk_rows_do_not_depend_on_the_number_of_rows
        test_determinism::test_old_log_probs_are_those_of_the_loss
        test_linear_logprobs::test_old_and_reference_log_probs_are_those_of_the_loss
        test_needs_sources::test_no_atomics_and_nothing_that_tunes_itself
        """,
        gpu="""
        triton_recipes::test_the_same_bits_again
        test_linear_logprobs::test_old_and_reference_log_probs_are_those_of_the_loss
        """,
        says=(("docs/numerics.md", "From hidden states matrix libraries may choose their kernel by the number of rows."),),
    ),
    Need(
        "Ratios of sequences: missing, with padding in them, or a product where a mean is meant",
        "trl#4947 trl#6654 prime-rl#858 nemo-rl#2269",
        """
        test_grpo_loss::test_objective_matches_oracle test_grpo_loss::test_packed_equals_padded
        test_linear_grpo_loss::test_packed_equals_padded test_corrections::test_importance_weights
        test_determinism::test_a_sequence_depends_on_no_other
        """,
    ),
    Need(
        "Two fusions on one model; patches that outlive their use",
        "verl#1720 verl#2119 liger#242 liger#772 trl#3680",
        """
        test_integration_trl::test_nothing_is_imported_or_patched test_integration_trl::test_what_is_refused
        test_integration_trl::test_undo test_integration_trl::test_slot_is_taken_once
        test_integration_verl::test_binding_is_refused_and_undone
        test_integration_shared::test_nothing_stays_bound_after_an_error
        test_integration_shared::test_the_core_does_not_know_them
        """,
    ),
    Need(
        "Ids of padding, or ids that were never written",
        "prime-rl#1525 allenai/open-instruct#605 RL-Align/RL-Kernel#161",
        """
        test_token_logprobs::test_masked_rows_may_hold_anything test_bad_input::test_value_error
        test_linear_bad_input::test_value_error test_row_kernels::test_what_cannot_be_computed_shows_in_its_row
        test_sanitizers::test_hostile_calls
        """,
        gpu="benchmarks/gpu_stages.py::memcheck",
    ),
    # ---- crashes
    Need(
        "Offsets of 32 bits, in batches of more than 2^31 logits",
        "cce#37 liger#251 liger#804 meta-pytorch/torchtune#2507 fla-org/flash-linear-attention#1082",
        """
        test_needs_inputs::test_rows_behind_element_2_to_the_31
        test_needs_sources::test_program_ids_are_64_bit_and_on_the_axis_that_has_room
        """,
        gpu="triton_recipes::test_offsets_beyond_32_bits",
    ),
    Need(
        "A grid that ends at 65 535 rows",
        "liger#1294 triton-lang/triton#3299 vllm-project/vllm#52381",
        """
        test_needs_sources::test_program_ids_are_64_bit_and_on_the_axis_that_has_room
        test_token_logprobs::test_many_rows test_grpo_loss_autograd::test_many_rows
        """,
        gpu="test_token_logprobs::test_many_rows test_grpo_loss_autograd::test_many_rows",
    ),
    Need(
        "no_grad, evaluation, frozen inputs, an empty batch",
        "liger#930 trl#4850 ms-swift#7052 liger#507 verl#5273 prime-rl#1539",
        """
        test_token_logprobs_autograd::test_frozen_no_grad_and_inference_mode
        test_grpo_loss_autograd::test_frozen_no_grad_and_inference_mode test_linear_engine::test_no_gradient_wanted_is_forward_only
        test_linear_engine::test_frozen_parts test_token_logprobs::test_no_rows_and_all_masked
        test_grpo_loss_autograd::test_no_rows test_linear_grpo_loss::test_no_rows test_integration_trl::test_evaluation
        """,
    ),
    Need(
        "A completion, micro-batch or shard without a trained token",
        "trl#3248 trl#5826 unsloth-zoo#1262 axolotl-ai-cloud/axolotl#3033",
        """
        test_grpo_loss_autograd::test_all_masked test_linear_grpo_loss::test_all_masked
        test_needs_ranks::test_micro_batches_of_two_ranks test_head_ranks::test_on_two_ranks
        context_parallel_checks::check_masked_rank
        test_trainer_options::test_a_batch_without_advantages_is_an_update_with_zero_gradient
        """,
    ),
    Need(
        "Hidden states taken for logits, lengths that are off by one",
        "unsloth-zoo#708 unsloth#5121 unsloth#8204 unsloth#4081",
        """
        test_linear_bad_input::test_value_error test_bad_input::test_value_error
        test_needs_inputs::test_hidden_states_and_weight_the_wrong_way_round
        test_needs_inputs::test_hidden_states_where_logits_belong
        """,
    ),
    Need(
        "Kernels launched on the current device instead of that of the data (two GPUs: not run)",
        "liger#401 triton-lang/triton#5205 unsloth#4137 trl#4816",
        """
        test_needs_sources::test_kernels_are_launched_on_the_device_of_their_data test_bad_input::test_value_error
        test_linear_bad_input::test_value_error
        """,
    ),
    Need(
        "Graph breaks and recompilations under torch.compile",
        "liger#174 liger#642 pytorch/pytorch#163811 unsloth#6825",
        """
        test_compile::test_grpo_loss_is_one_graph test_compile::test_linear_grpo_loss_is_one_graph
        test_compile::test_logprobs_are_one_graph test_compile::test_lengths_and_new_tensors_compile_nothing
        test_compile::test_opcheck test_needs_inputs::test_a_compiled_loss_under_activation_checkpointing
        """,
    ),
    Need(
        "Tiles and warps that one GPU has and another has not",
        "liger#231 unsloth#3503 vllm-project/vllm#33846 verl#7950",
        """
        test_resources::test_budgets test_needs_sources::test_kernels_hardly_take_shared_memory
        test_triton_fallback::test_values_and_gradients_in_the_interpreter test_triton_fallback::test_auto_alone_may_fall_back
        test_bad_input::test_fallback_warns_once_and_strict_raises
        """,
        gpu="benchmarks/gpu_stages.py::resources",
    ),
    # ---- time and memory
    Need(
        "Logits still take the memory, or do so in the passes that an option does not reach",
        "trl#3678 trl#2709 nemo-rl#2871 nemo-rl#4222 slime#2253 verl#7826",
        """
        test_linear_memory::test_flat_in_the_number_of_rows test_linear_memory::test_no_gradient_wanted
        test_linear_engine::test_rows_in_products test_linear_grpo_loss::test_skip_inactive_is_exact
        test_linear_grpo_loss::test_a_reference_head_stands_for_its_log_probs test_integration_trl::test_rows_that_are_projected
        """,
        gpu="benchmarks/gpu_stages.py::comparison",
    ),
    Need(
        "The fused version is slower than the plain one",
        "pytorch/pytorch#124480 liger#1414 liger#323 prime-rl#1525",
        """
        test_speed::test_loss_and_gradient_of_logits_in_place test_speed::test_loss_and_gradients_from_hidden_states
        test_speed::test_logprobs_alone test_benchmarks::test_a_provider_with_wrong_results_shows_its_error_and_is_not_timed
        """,
        gpu="benchmarks/gpu_kit.py::targets",
    ),
    Need(
        "The host waits for the device",
        "liger#1292 liger#237 meta-pytorch/tritonbench#477",
        """
        test_advantage_estimators::test_no_estimator_waits_for_the_device test_corrections::test_corrections_do_not_wait_for_the_device
        test_entropy::test_threshold_waits_for_nothing test_gpu_kit::test_what_is_documented_to_wait_waits_and_nothing_else
        test_device_waits::test_no_call_waits_but_those_that_say_so test_row_counts::test_a_loss_is_captured_after_a_first_call
        """,
        gpu="benchmarks/gpu_stages.py::counters",
        says=(("docs/numerics.md", "`linear_logprobs` with a mask reads it on the host"),),
    ),
    Need(
        "A new kernel, or new tuning, for every length",
        "fla-org/flash-linear-attention#533 facebookresearch/xformers#1037 liger#146 trl#5180",
        """
        test_triton_compile::test_no_length_and_no_schedule_compiles_again
        test_needs_sources::test_no_atomics_and_nothing_that_tunes_itself
        """,
        gpu="benchmarks/gpu_stages.py::counters",
    ),
    Need(
        "Entropy costs memory that nobody asked for",
        "verl#2608 trl#4013 slime#1185 OpenPipe/ART#555",
        """
        test_needs_inputs::test_a_temperature_on_a_view_makes_no_copy
        test_linear_logprobs::test_unused_entropy_costs_nothing_and_changes_nothing
        test_token_logprobs_autograd::test_entropy_options
        """,
    ),
    Need(
        "A frozen head still pays for its gradient",
        "prime-rl#3011 trl#7076 liger#237 liger#1441",
        "test_linear_engine::test_frozen_parts test_linear_memory::test_frozen_head_has_no_buffer test_head::test_tied_and_frozen",
    ),
    Need(
        "Padding is computed like the rest",
        "trl#7087 trl#7179 trl#5854 unsloth-zoo#840",
        """
        test_linear_engine::test_rows_in_products test_grpo_loss::test_packed_equals_padded
        test_linear_grpo_loss::test_packed_equals_padded test_row_kernels::test_rows_that_are_not_read
        """,
    ),
    Need(
        "A vocabulary that is sharded over ranks",
        "areal#664 areal#1322 axolotl-ai-cloud/axolotl#2977 cce#59 liger#1371",
        "test_vocab_parallel::test_on_ranks test_two_row_kernels::test_parts_of_rows_merge",
    ),
    # ---- installing
    Need(
        "Imports that fail without a GPU, Triton or another package; pins that hold an environment back",
        "liger#258 liger#569 trl#3480 triton-lang/triton#6150 hiyouga/LlamaFactory#9387",
        """
        test_package::test_import_pulls_in_nothing_optional
        test_package::test_without_triton_and_without_the_cpp_module_eager_runs_with_one_warning
        test_package::test_without_a_compiler_it_installs_and_doctor_says_what_is_missing
        test_doctor::test_without_compiled_module_triton_and_optional_packages_it_says_how_to_get_them
        test_needs_sources::test_no_upper_pins
        """,
    ),
    # ---- and
    Need(
        "Vision models whose inputs were rebuilt by hand lose some",
        "trl#6697 trl#5216 ms-swift#6534",
        "test_integration_trl::test_images",
    ),
    Need(
        "A new loss has to wait for a kernel",
        "liger#1057 liger#1073 liger#1320 trl#3435",
        """
        test_grpo_loss::test_custom_surrogate test_grpo_loss::test_custom_kl triton_recipes::test_an_objective_is_what_its_paper_says
        triton_cases::test_the_family_compiles_to_what_torch_runs test_filters::test_a_filter_of_yours_is_not_passed_over
        """,
    ),
    Need(
        "Equal rewards leave an advantage, one NaN reward spoils its group",
        "trl#5640 trl#5773 trl#7068",
        """
        test_advantages::test_equal_rewards_are_exactly_zero
        test_advantages::test_equal_rewards_are_zero_for_every_estimator test_advantages::test_rewards_that_are_not_finite
        test_advantages::test_missing_rewards_count_nowhere
        """,
    ),
    Need(
        "A temperature on a view of the logits copies all of them",
        "trl#5254 trl#6553",
        "test_needs_inputs::test_a_temperature_on_a_view_makes_no_copy",
    ),
    Need(
        "fp16 that overflows or vanishes",
        "unsloth-zoo#600 unsloth-zoo#598",
        """
        test_grpo_loss_autograd::test_fp16_with_a_loss_scale test_linear_engine::test_fp16_with_a_loss_scale
        test_token_logprobs_autograd::test_fp16_upstream_with_a_loss_scale test_token_logprobs::test_very_large_logits
        """,
    ),
    Need(
        "Metrics over other tokens than the loss",
        "RLinf/RLinf#1471 trl#6713 trl#6021",
        "test_grpo_loss::test_metrics_match_a_direct_computation test_parity_trl::test_every_combination",
    ),
    Need(
        "One option with two meanings: TRL's CISPO reads epsilon_high as the cap of the ratio, defaults differ between entry points",
        "trl#7068 trl#4772",
        """
        test_parity_trl::test_cispo_without_epsilon_high test_presets::test_preset test_presets::test_numerics
        test_numerics::test_numbers
        """,
    ),
    Need(
        "A loss of 0, taken for a failure",
        "trl#2703 trl#3452 unsloth#2291",
        "test_linear_logprobs::test_old_and_reference_log_probs_are_those_of_the_loss",
        says=(
            (
                "grpo_kernels/losses.py",
                "On-policy (ratio 1, advantages that sum to 0) a loss near 0 is normal: its gradient is not.",
            ),
        ),
    ),
]


def file_of(name: str) -> Path:
    """The file of `file::test`."""
    stem = name.partition("::")[0]
    return TESTS.parent / stem if "/" in stem else next(TESTS.rglob(f"{stem}.py"), TESTS / f"{stem}.py")


def thread(name: str) -> str:
    """A link to it."""
    project, number = re.fullmatch(r"([\w./-]+)#(\d+)", name).groups()  # type: ignore[union-attr]
    return f"[{name}](https://github.com/{PROJECTS.get(project, project)}/issues/{number})"


def names(proof: str) -> str:
    """Tests, by file."""
    files: dict[str, list[str]] = {}
    for name in proof.split():
        file, _, test = name.partition("::")
        files.setdefault(file, []).append(test)
    return "; ".join(f"{file}: {', '.join(f'`{test}`' for test in tests if test) or 'all'}" for file, tests in files.items())


def page() -> str:
    lines = [
        "# What breaks elsewhere, and the test that it does not break here",
        "",
        "Threads are those where users of other projects met it. `python -m pytest` runs everything in the column of proofs",
        "but what is under *GPU*, which `python -m benchmarks.gpu_kit` runs where there is one; `triton_cases` runs as compiled for",
        "a GPU (`-m compiled`: all of it), `*_checks` on several processes. A quotation is what the documentation says of a limit.",
        "",
        "Files are named without their folder: no two have one name. Written by `python tests/repository/needs.py`; `test_needs.py`",
        "checks that all of it exists.",
        "",
        "| | what breaks | seen at | proof here |",
        "|---:|---|---|---|",
    ]
    for number, need in enumerate(NEEDS, 1):
        proof = names(need.proof)
        if need.gpu:
            proof += f". *GPU*: {names(need.gpu)}"
        for file, sentence in need.says:
            proof += f'. [{file}](../{file}): "{sentence.rstrip(".")}"'
        lines.append(f"| {number} | {need.breaks} | {' '.join(map(thread, need.seen.split()))} | {proof} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
