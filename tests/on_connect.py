"""Which tests of a classic session run a second time on Spark Connect.

They are what Connect may do otherwise: another client plans the query, artifacts replace
broadcasts, jobs are cancelled by tag. What only Connect has is marked ``connect``.
"""

from __future__ import annotations

AGAIN = frozenset(
    f"tests/{file}::{name}"
    for file, names in {
        "test_estimator.py": (
            "test_fit_and_transform",
            "test_drawn_validation_rows_are_always_the_same",
            "test_pipeline_with_save_and_load",
            "test_cross_validator_in_parallel",
            "test_wrong_values_are_refused_before_any_job",
        ),
        "test_multiplefits.py": (
            "test_threads_train_at_the_same_time",
            "test_an_error_in_one_leaves_the_others_and_nothing_behind",
        ),
        "test_model.py": (
            "test_classifier_adds_three_columns",
            "test_vectors_dense_and_sparse",
            "test_bad_rows_are_refused_by_name",
            "test_inside_a_pipeline_model",
            "test_streaming",
        ),
        "test_runner.py": (
            "test_a_function_trains_on_the_rows_of_a_data_frame",
            "test_several_data_sets_reach_the_same_workers",
            "test_an_error_comes_with_rank_and_traceback",
            "test_what_is_reported_is_shown",
            "test_arguments_of_any_size_arrive",
        ),
        "spark/frames/test_executor_calls.py": ("test_footers_of_many_files",),
        "spark/session/test_failing_queries.py": (
            "test_spark_names_the_innermost_cause",
            "test_a_row_that_a_stage_refuses_ends_every_verb_at_once",
        ),
        "spark/explain/test_choose_values.py": ("test_what_is_auto_is_chosen_before_the_fit",),
        "tuning/test_tune.py": (
            "test_trials_share_a_spool_and_the_best_one_is_given",
            "test_the_best_model_has_the_weights_that_were_judged",
        ),
        "spark/inference/test_evaluate_model.py": (
            "test_a_classifier_is_evaluated_as_scikit_learn_does",
            "test_wrong_labels_are_named",
            "test_each_row_has_its_loss",
        ),
        "spark/inference/test_output_columns.py": ("test_every_kind_of_output_at_once",),
        "spark/run/test_run_facts.py": ("test_a_fit_leaves_its_record_and_page",),
        "spark/rounds/test_averaging_rounds.py": (
            "test_rounds_are_what_a_gang_does",
            "test_executors_take_the_mean_with_the_bits_of_the_driver",
            "test_the_users_error_comes_once_and_the_next_fit_works",
        ),
    }.items()
    for name in names
)
FILES = sorted({name.partition("::")[0] for name in AGAIN})

if __name__ == "__main__":
    print(*FILES)
