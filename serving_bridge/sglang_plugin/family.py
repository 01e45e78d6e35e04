"""What the plugin's algorithms are to SGLang: members of its DFLASH family."""

from __future__ import annotations

from typing import Any


def family_class() -> Any:
    """Base class of the algorithms; made when asked for, as SGLang is not there to import from elsewhere."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class DFlashFamily(CustomSpecAlgo):
        """To SGLang, a member of the DFLASH family."""

        def is_dflash(self) -> bool:
            return True

        def is_dflash_family(self) -> bool:
            return True

        def supports_target_verify_for_draft(self) -> bool:
            return True

        def supports_prefill_shared_read_done(self) -> bool:
            return True

        def supports_mixed_chunk(self) -> bool:
            return True

        def supports_grammar_overlap(self) -> bool:
            return True

        def handle_server_args(self, server_args: Any) -> None:
            from sglang.srt.arg_groups import speculative_hook

            if server_args.disaggregation_mode != "null":
                raise ValueError(
                    f"--disaggregation-mode {server_args.disaggregation_mode}: {server_args.speculative_algorithm} "
                    "decodes where it prefilled"
                )
            speculative_hook._handle_dflash(server_args)

        # three more that SGLang asks of every algorithm, though its base class for custom ones lacks them

        def create_future_map(self, *args: Any, **kwargs: Any) -> Any:
            return SpeculativeAlgorithm.DFLASH.create_future_map(*args, **kwargs)

        def need_topk(self) -> bool:
            return False

        def carries_draft_hidden_states(self) -> bool:
            return False

    return DFlashFamily
