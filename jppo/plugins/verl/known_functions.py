"""Fingerprints of verl's own functions in all versions until 2026-08, by scripts/verl_functions.py."""

_TABLE = """
__init__._default_compute_score 211832 466c46 51bda5 641fa8 7e8d81 82fcd9 be739c; __init__.default_compute_score 641fa8
6afe73 71a4c6 86d2d4 afb24e df9d68 edd5a2; __init__.default_compute_score_image 441c52;
__init__.get_default_compute_score 01b549 ede1f0; batch.__call__ 00db0c 5084ac a2d95e bd3f1b; batch.verify 6c2cb1
fb268a; core_algos.agg_loss 237f73 40d981 4c0298 74a3a3 78a75f 875e99 8d65ca 9b1e4a a02539 cdc36a;
core_algos.compute_entropy_loss 324c74 525e31 a984a1; core_algos.compute_gae_advantage_return 07be7b 3860c8 f97dbf;
core_algos.compute_gdpo_outcome_advantage 74bd26; core_algos.compute_gpg_outcome_advantage 3085a9 e958c5;
core_algos.compute_grpo_outcome_advantage 063a86 6fed24 70c308 d7c488 eb88ea f32573 fa3eeb;
core_algos.compute_grpo_passk_outcome_advantage 429b90 50a5f0; core_algos.compute_grpo_vectorized_outcome_advantage
560d7c 7ab515 9c32aa; core_algos.compute_multi_turn_optimal_token_baseline_advantage 48b406;
core_algos.compute_opo_outcome_advantage 3fa010 c63b34; core_algos.compute_optimal_token_baseline_advantage 78dbe9;
core_algos.compute_pf_ppo_reweight_data 29feb1 4b3c64; core_algos.compute_policy_loss 531036 5aebe9 7e04f2 930167 ab7a3d
b92203 bdbdcf c32d8a e03b7c f6bde6; core_algos.compute_policy_loss_bypass_mode 06f53d 9a1124;
core_algos.compute_policy_loss_cispo 0e068f; core_algos.compute_policy_loss_clip_cov 18504c 39c99a 983cce a5ce27 bca691;
core_algos.compute_policy_loss_dppo_kl d1333f; core_algos.compute_policy_loss_dppo_tv 7573bc;
core_algos.compute_policy_loss_dro dafcaf; core_algos.compute_policy_loss_geo_mean 4867b8 64b0f3 e2350d;
core_algos.compute_policy_loss_gpg 17e027 4e7cbf 5e5433 a84010; core_algos.compute_policy_loss_gspo 06c8a6 0b08a5 93106e
bcc5c0; core_algos.compute_policy_loss_kl_cov 0d9fd9 66c6bc 74cbfc b92037 bc20a0;
core_algos.compute_policy_loss_reinforce 007117; core_algos.compute_policy_loss_rollout_correction_wrapper 09ea32 33739c
d1294b; core_algos.compute_policy_loss_sapo f2798c; core_algos.compute_policy_loss_vanilla 34b714 84f3e4 868853 c3a3f9
ca1143; core_algos.compute_policy_loss_with_rollout_correction 64aab6 6ed8b7 d4841f dad9a4 f02b6c;
core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage 24dbb4 60285f 9efc8b d98e23;
core_algos.compute_reinforce_plus_plus_outcome_advantage 5c01ef 5d1e50 93f633 a6fcd0;
core_algos.compute_remax_outcome_advantage 93fdad bb80e7 f5420a; core_algos.compute_rewards 4c1a0d;
core_algos.compute_rloo_outcome_advantage 647f99 80443f 9f139e e1ca40;
core_algos.compute_rloo_vectorized_outcome_advantage 6294dd; core_algos.compute_value_loss 0d4ac2 7e41f4 887d9e c348f1
c86bb9; core_algos.compute_weights 5d441f; core_algos.kl_penalty 062ab1 28eb47 76387c 9ac7f2 a3956c c20a78 c925b2;
core_algos.kl_penalty_forward 9ac7f2; dapo.__call__ 03a557 099f85 0a91a5 0b5bde 4c3e9a 55f9c2 861610 b476ee;
dapo.run_single 48cdfb 9e94ae; dp_actor.update_policy 056843 0ac3c9 0c22d7 0ddd36 11ab39 12d069 12f639 150d8b 16e478
193579 2becdc 303881 3133f9 327cdd 3423a7 390228 3f2532 420e89 507bb6 5ca094 5dd9f2 5e0db1 6089a7 648ed4 64c96f 6b3606
740a72 7788e6 7da07a 845375 85a385 88a499 9005c5 9039b3 90a345 952728 9a2066 9ad1b6 a82d03 b97cbd bb70fd c21a29 df1a3c
e446c4 e55d15 e93802 efd178; dp_critic.update_critic 03c875 0960ea 0e0571 1a3109 43f84c 4799a0 54ec88 5e52ab 5e6ffd
5f37ac 682d73 7b7c2f 7cdd03 82f543 90297a 9689e9 9d277b a40e70 a8dae9 b758f3 cbbc5a d9b1a2;
fsdp_workers._build_critic_model_optimizer 0db53d 0dc22b 125702 31e54d 36812c 36a78a 38492a 3b9619 46aaf0 48c75c 4fd7d2
56be36 59c98a 5bbc53 60c064 68b25d 6f8680 835f27 866075 8ad314 8b470b 8e83f7 98cf0c a59e28 adbf3b aeffde b23fa1 c03e49
c10cce c35033 c3f3cd c54a54 c6185f cc0c17 cf34a9 d504a2 e2490c e97343 f02fef f560e6 fd8a04;
fsdp_workers._build_model_optimizer 02711b 02f880 0587ab 05af22 07ecef 0c4f94 14eaae 15d340 18c21c 2cae99 365f09 3e1dab
41b876 41ce6d 437fa0 451366 48e0cd 4aa295 4c01c6 4c2898 50f824 5b7580 611eea 65c422 68dad8 6e3df3 73933b 7a493e 7a8bef
84ad9a 876fcc 8b3390 94c96d 951458 a086ad b0148b b43bb6 b68076 b6c2ab bb6dc3 bd5a37 c0ef04 c1cecd c52a1b c57c7a ca73bf
d6b92c d852ab e3ca29 ec3bd9 ecedab ed8f47 f4250c f4bc0d fa8f95; gsm8k.compute_score da9046; gsm8k.extract_solution
169b5d 93b1bb 9e94a7; losses.ppo_loss 6388b3 68ef69 89c3f0 b02290 d5546d; losses.sft_loss 794a44 89149e;
losses.value_loss 529609 63c0d0 8c7a6f b2f774; main_ppo._default_compute_score 56014d 782db4;
main_ppo._select_rm_score_fn 86cf13; math.compute_score 1cf670 bedd17; math.fix_a_slash_b 32605e aa1329; math.fix_fracs
497a9f ce9e91; math.fix_sqrt 95f1b5; math.is_equiv 0b5389; math.last_boxed_only_string 04c32d 872e64; math.remove_boxed
37233b; math.remove_right_units c7d8d1; math.strip_string 99a93c ae3ece; math_dapo.__enter__ eaa633; math_dapo.__exit__
f55a3d; math_dapo.__init__ 2ecdba; math_dapo.compute_score 1315db; math_dapo.handle_timeout 58ff04;
math_dapo.is_correct_minerva 894c12; math_dapo.is_correct_strict_box 80c2e4; math_dapo.last_boxed_only_string 89db71;
math_dapo.normalize_final_answer 51e9ca; math_dapo.remove_boxed e72cc7; math_dapo.verify bf77f7 faf349;
math_reward.compute_score bedd17; math_reward.fix_a_slash_b 32605e 49e83c; math_reward.fix_fracs 479696 497a9f;
math_reward.fix_sqrt 95f1b5; math_reward.is_equiv 0b5389; math_reward.last_boxed_only_string 872e64;
math_reward.remove_boxed 37233b; math_reward.remove_right_units c7d8d1; math_reward.strip_string 5f9aab 99a93c;
megatron_actor.forward_backward_batch 07672e 1b677c 262aab 2647ea 26968d 28f6a5 2930d1 2cd77f 2ea593 4120f0 49572f
4bf9fc 560e1a 5a78f5 608471 617b67 6525a8 655e4c 6c0a54 6f2b94 72560b 74b03a 859fd4 88d3ee 900d0f 96e090 9d1877 9e6179
a3084a a4da25 b3ec63 b817a9 bcf476 c33570 c9accf ca1912 cc93f3 d26b7f d77f86 e206e5 ec0477 ee9d01 f43d3b fc9942;
megatron_actor.make_minibatch_iterator 07fa14 1b3817 1e9c1b 2223f0 55c247 560bea a11272 b952cc ee97df;
megatron_actor.update_policy 02bbac 267014 2f6c55 300e69 34b77c 438c92 462a80 4f51dd 51b5c2 552412 772d57 7ccc02 8aed0a
8cf6e8 be1f03 bf33b6 cb0246 cc00aa cefa85 d9efeb; multiturn_sft_dataset.__getitem__ 002a08 21140d 24b206 299399 3eb94b
459bb5 516086 5638cd 600636 9080b3 b1d24a be206b ccb967 cd0844 cfe475 d38d6e e29d5e e2a21c ee808b f78d37;
multiturn_sft_dataset._process_message_tokens 92cf21 9dee3b; multiturn_sft_dataset._process_single_message 5fd535
bb0f99; multiturn_sft_dataset._read_files_and_process 08d6b8 15e527 317057 3e22c8 3ff6b7 467cdb 5b1fe6 787e4c 7bf4b4
9f60a3 d1b3f8; naive.__call__ 15cf21 237acf 371877 4a6222 4c6375 58f1fe 73763f 7a645a 7f92a5 c18eb4 d0eac0 d7d8b2;
naive.run_single 83fa72 850147; naive.verify af05ba bcf8c9; prime.__call__ 1b1269 251e40 4e5e44 63e850 6a1f96 b3913f
dd711a decae2; prime.verify 40527d 61408a a347c7 b5172e b583ac; ray_trainer.apply_kl_penalty 06b0da 0ef7ee 4f2983
b37e65; ray_trainer.compute_advantage 262e51 2bc08c 4138c8 5a0990 5f3e59 738538 755657 781128 7b22ae 7c4bd4 802f35
8a0234 8d1aae 9e1508 a57327 c3756c c8105a d1bb5c d28e13 e0b2fd e7668b ef8f38 f25fcf f680fd;
ray_trainer.compute_response_mask ba0a43; rl_dataset.__getitem__ 08974c 0f65b8 112a01 148f75 26e3f8 2a7cc7 2c70e9 2d288e
3a6342 3bc0e1 3faf2d 432b2b 5654c1 5910cc 5aae1d 7102b3 773353 968bbd a37066 b8453e bad0a3 ccf394 cfa864 de529d df7177
e9b296 f31e1b f78303 fc4f6b; rl_dataset._build_messages 02da58 099563 36ee66 8a101c 8eee99 8fee16 b8b37a cd7b9d db2673;
rl_dataset._read_files_and_tokenize 18589b 35b75c 4c9c4d 532b42 7bcf95 965b5b a62d6e c1b25c e33434 ea86aa;
rl_dataset.maybe_filter_out_long_prompts 1fd555 22d5a7 2fe564 40749a 672460 84dcce afa672 b5d5bb b87f6c bb0916 e2176e;
sft_dataset.__getitem__ 461515 b1caf8 e023b0; sft_dataset._read_files_and_tokenize 07bfad 218487 30449f 76b213 829a4a
96c906
"""

KNOWN = dict(entry.split(" ", 1) for entry in " ".join(_TABLE.split()).split("; ") if entry)
