"""The names of classes of transformers that compute the same, by the attributes they read.

Each is NAME/Class of transformers.models.NAME.modeling_NAME, or NAME/FILE/Class where the file has
another name. All have the same forward pass in 5.23 and 5.24, of which they may be in one only.
"""

from __future__ import annotations

# weight * (x / sqrt(mean(x^2) + variance_epsilon)); the end of each name, RMSNorm, is left out
RMS_NORMS = """
aimv2/Aimv2 apertus/Apertus apertus1p5/Apertus1p5Text arcee/Arcee aria/AriaText axk1/AXK1 axk2/AXK2
bailing_hybrid/BailingHybrid bamba/Bamba bitnet/BitNet blt/Blt chameleon/Chameleon clvp/Clvp
cohere2_moe/Cohere2Moe cosmos3_edge/Cosmos3EdgeText csm/Csm cwm/Cwm deepseek_ocr2/DeepseekOcr2Text
deepseek_ocr2/DeepseekOcr2Vision deepseek_v2/DeepseekV2 deepseek_v3/DeepseekV3
deepseek_v32/DeepseekV32 deimv2/Deimv2 dia/Dia diffllama/DiffLlama doge/Doge dots1/Dots1
dots3_note/Dots3Note emu3/Emu3 ernie4_5/Ernie4_5 ernie4_5_moe/Ernie4_5_Moe
ernie4_5_vl_moe/Ernie4_5_VLMoe eurobert/EuroBert evolla/Evolla exaone4/Exaone4 exaone4_5/Exaone4_5_
exaone_moe/ExaoneMoe falcon_h1/FalconH1 falcon_mamba/FalconMamba glm/Glm glm4/Glm4 glm4_moe/Glm4Moe
glm4_moe_lite/Glm4MoeLite glm4v/Glm4v glm4v_moe/Glm4vMoe glm4v_moe/Glm4vMoeText glm5_next/Glm5Next
glm5_next/Glm5NextText glm_image/GlmImage glm_moe_dsa/GlmMoeDsa glm_ocr/GlmOcr granite/Granite
granite4_vision/Granite4VisionText granite_docling/GraniteDoclingText granite_swa/GraniteSWA
granitemoe/GraniteMoe granitemoe_swa/GraniteMoeSWA granitemoehybrid/GraniteMoeHybrid
granitemoeshared/GraniteMoeShared higgs_audio_v2/HiggsAudioV2 hunyuan_v1_dense/HunYuanDenseV1
hunyuan_v1_moe/HunYuanMoEV1 hunyuan_vl/HunYuanVL hy_v3/HYV3 hy_v4/HYV4 hy_v4_vl/HYV4VL
hyperclovax/HyperCLOVAX idefics2/Idefics2 idefics3/Idefics3 inkling/Inkling internvl/InternVLVision
jamba/Jamba jetmoe/JetMoe kimi_linear/KimiLinear kolibri1/Kolibri1 laguna/Laguna lfm2/Lfm2
lfm2_moe/Lfm2Moe lfm3/Lfm3 lfm3_vl/Lfm3VlVision lighton_ocr/LightOnOcr llama/Llama
longcat_flash/LongcatFlash mamba/Mamba mamba2/Mamba2 mellum/Mellum mimo_v2_flash/MiMoV2Flash
minicpm3/MiniCPM3 minimax/MiniMax minimax_m2/MiniMaxM2 ministral/Ministral ministral3/Ministral3
mistral/Mistral mistral3/Mistral3 mistral4/Mistral4 mistral_large4/MistralLarge4 mixtral/Mixtral
mllama/MllamaText molmo2/Molmo2 muse_glimmer_assistant/MuseGlimmerAssistant neucodec/NeuCodec
olmoe/Olmoe ovis2/Ovis2 paddleocr_vl/PaddleOCR pe_audio/PeAudioEncoder
pe_audio_video/PeAudioVideoEncoder pe_video/PeVideoEncoder phi3/Phi3 phi4_multimodal/Phi4Multimodal
pixtral/Pixtral qianfan_ocr/QianfanOCRVision qwen2/Qwen2 qwen2_5_omni/Qwen2_5Omni
qwen2_5_vl/Qwen2_5_VL qwen2_moe/Qwen2Moe qwen2_vl/Qwen2VL qwen3/Qwen3 qwen3_moe/Qwen3Moe
qwen3_omni_moe/Qwen3OmniMoe qwen3_omni_moe/Qwen3OmniMoeCode2Wav qwen3_omni_moe/Qwen3OmniMoeText
qwen3_omni_moe/Qwen3OmniMoeThinkerText qwen3_vl/Qwen3VLText qwen3_vl_moe/Qwen3VLMoeText
sapiens2/Sapiens2 seed_oss/SeedOss smollm3/SmolLM3 solar_open/SolarOpen timesfm/TimesFm
timesfm2_5/TimesFm2_5 ultrabert/Ultrabert ultravbert/UltraVBert unlimited_ocr/UnlimitedOcrText
vibevoice/VibeVoice vibevoice_acoustic_tokenizer/VibeVoiceAcousticTokenizer
vibevoice_asr/VibeVoiceAsr voxtral_realtime/VoxtralRealtime xcodec2/Xcodec2 youtu/Youtu zamba/Zamba
zamba2/Zamba2 zaya/Zaya
"""
# (1 + weight) * (x / sqrt(mean(x^2) + eps))
GEMMA_NORMS = """
gemma/GemmaRMSNorm gemma2/Gemma2RMSNorm gemma3/Gemma3RMSNorm minimax_m3_vl/MiniMaxM3VLRMSNorm
muse_glimmer/MuseGlimmerTextCenteredRMSNorm qwen3_5/Qwen3_5RMSNorm qwen3_5_moe/Qwen3_5MoeRMSNorm
qwen3_next/Qwen3NextRMSNorm recurrent_gemma/RecurrentGemmaRMSNorm
step3p7/Step3p7RMSNorm t5gemma/T5GemmaRMSNorm t5gemma2/T5Gemma2RMSNorm vaultgemma/VaultGemmaRMSNorm
"""
# last(act(first(x))) or last(act(first(x)) * second(x)), then a dropout, if there is one: the names
# of the layers before the activation, of it, of the last layer and of the dropout.
MLPS: dict[tuple[tuple[str, ...], str, str, str], str] = {
    (("gate_proj", "up_proj"), "act_fn", "down_proj", ""): """
afmoe/AfmoeMLP aimv2/Aimv2MLP aria/AriaSharedExpertsMLP axk1/AXK1MLP axk2/AXK2MLP
bailing_hybrid/BailingHybridMLP bamba/BambaMLP blt/BltMLP chameleon/ChameleonMLP cohere/CohereMLP
cohere2/Cohere2MLP cohere2_moe/Cohere2MoeMLP cohere_compass/CohereCompassMLP csm/CsmMLP cwm/CwmMLP
deepseek_ocr2/DeepseekOcr2TextMLP deepseek_ocr2/DeepseekOcr2VisionMLP deepseek_v2/DeepseekV2MLP
deepseek_v3/DeepseekV3MLP deepseek_v32/DeepseekV32MLP deimv2/Deimv2SwiGLUFFN diffllama/DiffLlamaMLP
diffusion_gemma/DiffusionGemmaText4MLP dinov2/Dinov2SwiGLUFFN
dinov2_with_registers/Dinov2WithRegistersSwiGLUFFN dinov3_vit/DINOv3ViTGatedMLP doge/DogeMLP
dots1/Dots1MLP dots3_note/Dots3NoteTextMLP dots3_note/Dots3NoteVisionMLP
embedding_gemma2/EmbeddingGemma2MLP emu3/Emu3MLP eomt/EomtSwiGLUFFN eomt_dinov3/EomtDinov3GatedMLP
ernie4_5/Ernie4_5MLP ernie4_5_moe/Ernie4_5_MoeMLP ernie4_5_vl_moe/Ernie4_5_VLMoeMLP esmc/EsmcMLP
eurobert/EuroBertMLP evolla/EvollaMLP exaone4/Exaone4MLP exaone4_5/Exaone4_5_MLP
exaone_moe/ExaoneMoeMLP flex_olmo/FlexOlmoMLP flint/FlintMLP gemma/GemmaMLP gemma2/Gemma2MLP
gemma3/Gemma3MLP gemma4/Gemma4TextMLP gemma4/Gemma4VisionMLP gemma4_unified/Gemma4UnifiedTextMLP
glm4_moe/Glm4MoeMLP glm4_moe_lite/Glm4MoeLiteMLP glm4v/Glm4VisionMlp glm4v_moe/Glm4vMoeTextMLP
glm4v_moe/Glm4vMoeisionMlp glm_moe_dsa/GlmMoeDsaMLP glm_ocr/GlmOcrVisionMlp granite/GraniteMLP
granite4_vision/Granite4VisionTextMLP granite_docling/GraniteDoclingTextMLP
granite_swa/GraniteSWAMLP helium/HeliumMLP higgs_audio_v2/HiggsAudioV2MLP hrm_text/HrmTextMLP
hunyuan_v1_dense/HunYuanDenseV1MLP hunyuan_v1_moe/HunYuanMoEV1MLP hunyuan_vl/HunYuanVLMLP
hy_v3/HYV3MLP hy_v4/HYV4MLP hy_v4_vl/HYV4VLMLP hyperclovax/HyperCLOVAXMLP idefics/IdeficsMLP
idefics2/Idefics2MLP jamba/JambaMLP kimi_linear/KimiLinearMLP kolibri1/Kolibri1MLP laguna/LagunaMLP
lara_mini/LaraMiniMLP llama/LlamaMLP longcat_flash/LongcatFlashMLP mellum/MellumMLP
mimo_v2_flash/MiMoV2FlashMLP minicpm3/MiniCPM3MLP ministral/MinistralMLP ministral3/Ministral3MLP
mistral/MistralMLP mistral4/Mistral4MLP mistral_large4/MistralLarge4TextMLP mllama/MllamaTextMLP
molmo2/Molmo2ImageProjectorMLP molmo2/Molmo2MLP
moonshine_streaming/MoonshinMoonshineStreamingDecoderMLP muse_glimmer/MuseGlimmerTextMLP
muse_glimmer_assistant/MuseGlimmerAssistantMLP muse_spark/MuseSparkTextMLP nomic_bert/NomicBertMLP
olmo/OlmoMLP olmo2/Olmo2MLP olmo3/Olmo3MLP olmo_hybrid/OlmoHybridMLP olmoe/OlmoeMLP ovis2/Ovis2MLP
ovis2/Ovis2VisionMLP paddleocr_vl/PaddleOCRMLP pe_audio/PeAudioEncoderMLP
pe_audio_video/PeAudioVideoEncoderMLP pe_video/PeVideoEncoderMLP pixtral/PixtralMLP qwen2/Qwen2MLP
qwen2_5_omni/Qwen2MLP qwen2_5_omni/Qwen2_5OmniMLP qwen2_5_vl/Qwen2MLP qwen2_5_vl/Qwen2_5_VLMLP
qwen2_moe/Qwen2MoeMLP qwen2_vl/Qwen2MLP qwen3/Qwen3MLP qwen3_5/Qwen3_5MLP qwen3_5_moe/Qwen3_5MoeMLP
qwen3_moe/Qwen3MoeMLP qwen3_next/Qwen3NextMLP qwen3_omni_moe/Qwen3OmniMoeCode2WavMlp
qwen3_omni_moe/Qwen3OmniMoeMLP qwen3_omni_moe/Qwen3OmniMoeTalkerTextMLP
qwen3_omni_moe/Qwen3OmniMoeThinkerTextMLP qwen3_vl/Qwen3VLTextMLP qwen3_vl_moe/Qwen3VLMoeTextMLP
qwen4_exp/Qwen4ExpTextMLP radio/RadioSwiGLUFFN rf_detr/RfDetrDinov2SwiGLUFFN
sapiens2/Sapiens2GatedMLP smollm3/SmolLM3MLP solar_open/SolarOpenMLP stablelm/StableLmMLP
tipsv2/Tipsv2VisionSwiGLUFFN ultrabert/UltrabertMLP unlimited_ocr/UnlimitedOcrTextMLP
vaultgemma/VaultGemmaMLP vibevoice/VibeVoiceMLP videomt/VideomtGatedMLP videomt/VideomtSwiGLUFFN
voxtral_realtime/VoxtralRealtimeMLP voxtral_realtime/VoxtralRealtimeTextMLP youtu/YoutuMLP
zamba/ZambaMLP
""",
    (("fc1",), "activation_fn", "fc2", ""): """
altclip/AltCLIPMLP audio_spectrogram_transformer/ASTMLP axk2/AXK2GateMLP beit/BeitMLP blip/BlipMLP
blip_2/Blip2MLP canary/CanaryDecoderMLP chinese_clip/ChineseCLIPVisionMLP clip/CLIPMLP
clipseg/CLIPSegMLP cohere_asr/CohereAsrDecoderMLP cosmos3_edge/Cosmos3EdgeMLP
cosmos3_edge/Cosmos3EdgeTextMLP deit/DeiTMLP dinov2/Dinov2MLP
dinov2_with_registers/Dinov2WithRegistersMLP eomt/EomtMLP florence2/Florence2VisionMLP
git/GitVisionMLP glm_image/GlmImageVisionMLP gradium_phonon_tts/GradiumPhononTTSMLP
granite_docling/GraniteDoclingVisionMLP groupvit/GroupViTMLP hiera/HieraMlp
hunyuan_vl/HunYuanVLVisionMLP hy_v4_vl/HYV4VLVisionMLP idefics2/Idefics2VisionMLP
idefics3/Idefics3VisionMLP ijepa/IJepaMLP inkling2/Inkling2VisionMLP instructblip/InstructBlipMLP
instructblipvideo/InstructBlipVideoMLP internvl/InternVLVisionMLP
jina_embeddings_v3/JinaEmbeddingsV3MLP kosmos2/Kosmos2VisionMLP llama4/Llama4VisionMLP
metaclip_2/MetaClip2MLP mimi/MimiMLP minicpm_ocr/MiniCPMOcrVisionMLP
minicpmv4_6/MiniCPMV4_6VisionMLP minicpmv4_7/MiniCPMV4_7VisionMLP
minimax_m3_vl/MiniMaxM3VLVisionMLP mlcd/MLCDMLP mllama/MllamaVisionMLP molmo2/Molmo2VisionMLP
moonshine/MoonshineEncoderMLP moonshine_streaming/MoonshineStreamingEncoderMLP
muse_spark/MuseSparkAudioMLP nanochat/NanoChatMLP nemotron3_5_transcribe/Nemotron3_5TranscribeMLP
nemotron3_diarization/Nemotron3DiarizationMLP neucodec/NeuCodecMLP oneformer/OneFormerTextMLP
owlv2/Owlv2MLP owlvit/OwlViTMLP paddleocr_vl/PaddleOCRVisionMLP phi/PhiMLP
phi4_multimodal/Phi4MultimodalVisionMLP pixio/PixioMLP pocket_tts/PocketTTSMLP
pocket_tts_audio_tokenizer/PocketTTSAudioTokenizerMLP qianfan_ocr/QianfanOCRVisionMLP
radio/RadioMLP rf_detr/RfDetrDinov2MLP rf_detr/RfDetrSegmentationMLP
sam3_lite_text/Sam3LiteTextConvMLP sam3_lite_text/Sam3LiteTextTextMLP siglip/SiglipMLP
siglip2/Siglip2MLP smolvlm/SmolVLMVisionMLP step3p7/Step3p7VisionMLP swin/SwinMLP
timesfm2_5/TimesFm2_5MLP tipsv2/Tipsv2MLP tipsv2/Tipsv2VisionMLP unlimited_ocr/UnlimitedOcrMLP
vibevoice/VibeVoiceDiffusionHeadMLP video_llama_3/VideoLlama3VisionMLP videomt/VideomtMLP
videoprism/VideoPrismMLP vit/ViTMLP vit_mae/ViTMAEMLP vit_msn/ViTMSNMLP vivit/VivitMLP
x_clip/XCLIPMLP xcodec2/Xcodec2MLP
""",
    (("up_proj",), "act_fn", "down_proj", ""): """
apertus/ApertusMLP apertus1p5/Apertus1p5TextMLP arcee/ArceeMLP dinov3_vit/DINOv3ViTMLP
eomt_dinov3/EomtDinov3MLP jais2/Jais2MLP nemotron/NemotronMLP nemotron_h/NemotronHMLP
neomme/NeoMMEMLP sapiens2/Sapiens2MLP
""",
    (("linear_fc1",), "act_fn", "linear_fc2", ""): """
cohere_compass/CohereCompassVisionMLP qwen3_5/Qwen3_5VisionMLP qwen3_5_moe/Qwen3_5MoeVisionMLP
qwen3_omni_moe/Qwen3OmniMoeTalkerResizeMLP qwen3_omni_moe/Qwen3OmniMoeVisionMLP
qwen3_vl/Qwen3VLVisionMLP qwen3_vl_moe/Qwen3VLMoeVisionMLP qwen4_exp/Qwen4ExpVisionMLP
""",
    (("lin1",), "act", "lin2", ""): """
deepseek_ocr2/DeepseekOcr2SamMLPBlock got_ocr2/GotOcr2MLPBlock pp_formulanet/PPFormulaNetMLPBlock
sam/SamMLPBlock sam_hq/SamHQMLPBlock seggpt/SegGptMlp slanext/SLANeXtMLPBlock
unlimited_ocr/UnlimitedOcrSamMLPBlock
""",
    (("fc1",), "act", "fc2", ""): """
ernie4_5_vl_moe/Ernie4_5VLVisionMLP kimi_k25/Kimi_K25VisionMLP muse_glimmer/MuseGlimmerVisionMLP
muse_spark/MuseSparkVisionMLP qwen2_vl/VisionMlp
""",
    (("c_fc",), "act", "c_proj", "dropout"): """
clvp/ClvpDecoderMLP decision_transformer/DecisionTransformerGPT2MLP gpt2/GPT2MLP
gpt_bigcode/GPTBigCodeMLP gpt_neo/GPTNeoMLP imagegpt/ImageGPTMLP
""",
    (("fc_in",), "act", "fc_out", "dropout"): """
codegen/CodeGenMLP gptj/GPTJMLP
""",
    (("dense_h_to_4h",), "act", "dense_4h_to_h", ""): """
gpt_neox/GPTNeoXMLP persimmon/PersimmonMLP
""",
}
# Layers with an Intermediate, act(dense(x)), and an Output, norm(dropout(dense(a)) + x): the names
# of the layer, of both without these words where they differ from it.
ENCODERS = """
align/AlignText altclip/AltRoberta bert/Bert bert_generation/BertGeneration big_bird/BigBird
blip/blip_text/BlipText blip_2/Blip2QFormer bridgetower/BridgeTowerBertCross:BridgeTower
bridgetower/BridgeTowerText:BridgeTower bros/Bros camembert/Camembert canine/Canine
chinese_clip/ChineseCLIPText clap/ClapText convbert/ConvBert data2vec/data2vec_text/Data2VecText
electra/Electra ernie/Ernie git/Git instructblip/InstructBlipQFormer
instructblipvideo/InstructBlipVideoQFormer layoutlm/LayoutLM layoutlmv2/LayoutLMv2
layoutlmv3/LayoutLMv3 lilt/Lilt luke/Luke markuplm/MarkupLM mra/Mra nystromformer/Nystromformer
rembert/RemBert roberta/Roberta roc_bert/RoCBert roformer/RoFormer splinter/Splinter tapas/Tapas
visual_bert/VisualBert xlm_roberta/XLMRoberta yoso/Yoso
"""
# Modules, by NAME, whose apply_rotary_pos_emb is that of Llama.
ROTARY = """
afmoe apertus apertus1p5 arcee aria axk1 axk2 bitnet chameleon cohere_compass cosmos3_edge csm cwm
dbrx deepseek_ocr2 deepseek_v3 deepseek_v32 dia diffllama doge dory dots1 embedding_gemma2 emu3
esmc esmfold2 eurobert exaone4 exaone4_5 exaone_moe falcon falcon_h1 flint gemma gemma2 gemma3
glm4_moe_lite gpt_neox_japanese gradium_phonon_tts granite granite4_vision granite_docling
granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared gte higgs_audio_v2 hrm_text
hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax idefics jais2 jetmoe jina_embeddings_v3
kolibri1 kyutai_speech_to_text lara_mini lasr lfm2 lfm2_moe llama mellum mimi minicpm3 minimax
ministral ministral3 mistral mistral4 mixtral mllama molmo2 moshi muse_glimmer muse_spark neucodec
nomic_bert olmoe paddleocr_vl persimmon phi phimoe pixtral pocket_tts pocket_tts_audio_tokenizer
qwen2 qwen2_5_omni qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_moe qwen3_omni_moe qwen3_vl
qwen3_vl_moe seed_oss smollm3 solar_open stablelm starcoder2 t5gemma t5gemma2 timesfm2_5 ultrabert
unlimited_ocr vaultgemma voxtral_realtime xcodec2 youtu zamba2
"""
# Their logits are lm_head(model(...).last_hidden_state), all of which go to loss_function with the
# labels, and nowhere else but into the output.
CAUSAL = """
apertus/ApertusForCausalLM arcee/ArceeForCausalLM bitnet/BitNetForCausalLM cwm/CwmForCausalLM
diffllama/DiffLlamaForCausalLM emu3/Emu3ForCausalLM ernie4_5/Ernie4_5ForCausalLM
exaone4/Exaone4ForCausalLM gemma/GemmaForCausalLM glm/GlmForCausalLM glm4/Glm4ForCausalLM
helium/HeliumForCausalLM hunyuan_v1_dense/HunYuanDenseV1ForCausalLM jais2/Jais2ForCausalLM
lfm2/Lfm2ForCausalLM llama/LlamaForCausalLM ministral/MinistralForCausalLM
ministral3/Ministral3ForCausalLM mistral/MistralForCausalLM olmo/OlmoForCausalLM
olmo2/Olmo2ForCausalLM olmo3/Olmo3ForCausalLM olmo_hybrid/OlmoHybridForCausalLM phi/PhiForCausalLM
phi3/Phi3ForCausalLM qwen2/Qwen2ForCausalLM qwen3/Qwen3ForCausalLM seed_oss/SeedOssForCausalLM
smollm3/SmolLM3ForCausalLM starcoder2/Starcoder2ForCausalLM
"""
