"""The norms of other libraries, known by the identity of their classes."""

from __future__ import annotations

from torch import nn

from .imported import imported_class

__all__ = ["known_norms"]

# transformers.models.NAME.modeling_NAME as NAME/Class, or NAME/FILE/Class where the file has
# another name: the modules of transformers 5.23 that derive from nn.Module alone and own nothing
# but the weights of a norm. (Those that derive from torch's norms need no entry.)
_TRANSFORMERS = """
afmoe/AfmoeRMSNorm aimv2/Aimv2RMSNorm apertus/ApertusRMSNorm arcee/ArceeRMSNorm aria/AriaTextRMSNorm
axk1/AXK1RMSNorm axk2/AXK2RMSNorm bailing_hybrid/BailingHybridRMSNorm
bailing_hybrid/BailingHybridRMSNormGated bamba/BambaRMSNormGated bamba/BambaRMSNorm beam/BeamRMSNorm
bitnet/BitNetRMSNorm blt/BltRMSNorm chameleon/ChameleonRMSNorm clvp/ClvpRMSNorm
cohere/CohereLayerNorm cohere2/Cohere2LayerNorm cohere2_moe/Cohere2MoeRMSNorm
cohere2_moe/Cohere2MoeLayerNorm cohere_compass/CohereCompassLayerNorm
cosmos3_edge/Cosmos3EdgeTextRMSNorm cpmant/CpmAntLayerNorm csm/CsmRMSNorm cwm/CwmRMSNorm
deberta/DebertaLayerNorm deepseek_ocr2/DeepseekOcr2VisionRMSNorm
deepseek_ocr2/DeepseekOcr2TextRMSNorm deepseek_v2/DeepseekV2RMSNorm deepseek_v3/DeepseekV3RMSNorm
deepseek_v32/DeepseekV32RMSNorm deepseek_v4/DeepseekV4RMSNorm deimv2/Deimv2RMSNorm dia/DiaRMSNorm
diffllama/DiffLlamaRMSNorm diffusion_gemma/DiffusionGemmaRMSNorm doge/DogeRMSNorm dots1/Dots1RMSNorm
dots3_note/Dots3NoteRMSNorm embedding_gemma2/EmbeddingGemma2RMSNorm emu3/Emu3RMSNorm
ernie4_5/Ernie4_5RMSNorm ernie4_5_moe/Ernie4_5_MoeRMSNorm ernie4_5_vl_moe/Ernie4_5_VLMoeRMSNorm
esm/esmfold/EsmFoldLayerNorm eurobert/EuroBertRMSNorm evolla/EvollaRMSNorm exaone4/Exaone4RMSNorm
exaone4_5/Exaone4_5_RMSNorm exaone_moe/ExaoneMoeRMSNorm falcon_h1/FalconH1RMSNormGated
falcon_h1/FalconH1RMSNorm falcon_mamba/FalconMambaRMSNorm flex_olmo/FlexOlmoRMSNorm
flint/FlintRMSNorm gemma/GemmaRMSNorm gemma2/Gemma2RMSNorm gemma3/Gemma3RMSNorm
gemma3n/Gemma3nRMSNorm gemma3n/Gemma3nAudioCumulativeGroupNorm gemma4/Gemma4RMSNorm
gemma4_unified/Gemma4UnifiedRMSNorm glm/GlmRMSNorm glm4/Glm4RMSNorm glm4_moe/Glm4MoeRMSNorm
glm4_moe_lite/Glm4MoeLiteRMSNorm glm4v/Glm4vRMSNorm glm4v_moe/Glm4vMoeTextRMSNorm
glm4v_moe/Glm4vMoeRMSNorm glm5_next/Glm5NextTextRMSNorm glm5_next/Glm5NextTextRMSNormGated
glm5_next/Glm5NextRMSNorm glm_image/GlmImageRMSNorm glm_moe_dsa/GlmMoeDsaRMSNorm
glm_ocr/GlmOcrRMSNorm gpt_oss/GptOssRMSNorm gradium_phonon_tts/GradiumPhononTTSTimestepNorm
granite/GraniteRMSNorm granite4_vision/Granite4VisionTextRMSNorm
granite_docling/GraniteDoclingTextRMSNorm granite_swa/GraniteSWARMSNorm granitemoe/GraniteMoeRMSNorm
granitemoe_swa/GraniteMoeSWARMSNorm granitemoehybrid/GraniteMoeHybridRMSNormGated
granitemoehybrid/GraniteMoeHybridRMSNorm granitemoeshared/GraniteMoeSharedRMSNorm
helium/HeliumRMSNorm higgs_audio_v2/HiggsAudioV2RMSNorm hunyuan_v1_dense/HunYuanDenseV1RMSNorm
hunyuan_v1_moe/HunYuanMoEV1RMSNorm hunyuan_vl/HunYuanVLRMSNorm hy_v3/HYV3RMSNorm hy_v4/HYV4RMSNorm
hyperclovax/HyperCLOVAXRMSNorm idefics/IdeficsRMSNorm idefics2/Idefics2RMSNorm
idefics3/Idefics3RMSNorm imagegpt/ImageGPTLayerNorm inkling/InklingRMSNorm inkling2/Inkling2RMSNorm
internvl/InternVLVisionRMSNorm jamba/JambaRMSNorm jetmoe/JetMoeRMSNorm kimi_linear/KimiLinearRMSNorm
kimi_linear/KimiLinearRMSNormGated kolibri1/Kolibri1RMSNorm kosmos2_5/Kosmos2_5LayerNorm
kyutai_speech_to_text/KyutaiSpeechToTextRMSNorm laguna/LagunaRMSNorm lfm2/Lfm2RMSNorm
lfm2_moe/Lfm2MoeRMSNorm lfm3/Lfm3RMSNorm lfm3_vl/Lfm3VlVisionRMSNorm lighton_ocr/LightOnOcrRMSNorm
llama/LlamaRMSNorm llama4/Llama4TextRMSNorm longcat_flash/LongcatFlashRMSNorm longt5/LongT5LayerNorm
mamba/MambaRMSNorm mamba2/MambaRMSNormGated mamba2/Mamba2RMSNorm mellum/MellumRMSNorm
mimo_v2_flash/MiMoV2FlashRMSNorm minicpm3/MiniCPM3RMSNorm minimax/MiniMaxRMSNorm
minimax_m2/MiniMaxM2RMSNorm minimax_m3_vl/MiniMaxM3VLRMSNorm ministral/MinistralRMSNorm
ministral3/Ministral3RMSNorm mistral/MistralRMSNorm mistral3/Mistral3RMSNorm
mistral4/Mistral4RMSNorm mistral_large4/MistralLarge4RMSNorm mixtral/MixtralRMSNorm
mllama/MllamaTextRMSNorm mobilebert/NoNorm molmo2/Molmo2RMSNorm
moonshine_streaming/MoonshineStreamingLayerNorm moshi/MoshiRMSNorm mt5/MT5LayerNorm
muse_glimmer/MuseGlimmerRMSNorm muse_glimmer/MuseGlimmerTextCenteredRMSNorm
muse_glimmer_assistant/MuseGlimmerAssistantRMSNorm muse_spark/MuseSparkRMSNorm
muse_spark/MuseSparkTextCenteredRMSNorm muse_spark/MuseSparkTextInputScaledRMSNorm
nemotron_h/NemotronHRMSNormGated nemotron_h/NemotronHRMSNorm nemotron_h_omni/NemotronH_Omni_RMSNorm
neomme/NeoMMERMSNorm neucodec/NeuCodecRMSNorm olmo2/Olmo2RMSNorm olmo3/Olmo3RMSNorm
olmo_hybrid/OlmoHybridRMSNormGated olmo_hybrid/OlmoHybridRMSNorm olmoe/OlmoeRMSNorm
openai_privacy_filter/OpenAIPrivacyFilterRMSNorm ovis2/Ovis2RMSNorm paddleocr_vl/PaddleOCRRMSNorm
pe_audio/PeAudioEncoderRMSNorm pe_audio_video/PeAudioVideoEncoderRMSNorm
pe_video/PeVideoEncoderRMSNorm phi3/Phi3RMSNorm phi4_multimodal/Phi4MultimodalRMSNorm
pix2struct/Pix2StructLayerNorm pixtral/PixtralRMSNorm pocket_tts/PocketTTSTimestepNorm
pop2piano/Pop2PianoLayerNorm qianfan_ocr/QianfanOCRVisionRMSNorm qwen2/Qwen2RMSNorm
qwen2_5_omni/Qwen2_5OmniRMSNorm qwen2_5_vl/Qwen2_5_VLRMSNorm qwen2_moe/Qwen2MoeRMSNorm
qwen2_vl/Qwen2VLRMSNorm qwen3/Qwen3RMSNorm qwen3_5/Qwen3_5RMSNormGated qwen3_5/Qwen3_5RMSNorm
qwen3_5_moe/Qwen3_5MoeRMSNormGated qwen3_5_moe/Qwen3_5MoeRMSNorm qwen3_moe/Qwen3MoeRMSNorm
qwen3_next/Qwen3NextRMSNormGated qwen3_next/Qwen3NextRMSNorm
qwen3_omni_moe/Qwen3OmniMoeThinkerTextRMSNorm qwen3_omni_moe/Qwen3OmniMoeTextRMSNorm
qwen3_omni_moe/Qwen3OmniMoeRMSNorm qwen3_omni_moe/Qwen3OmniMoeCode2WavRMSNorm
qwen3_vl/Qwen3VLTextRMSNorm qwen3_vl_moe/Qwen3VLMoeTextRMSNorm qwen4_exp/Qwen4ExpTextRMSNorm
qwen4_exp/Qwen4ExpTextRMSNormGated recurrent_gemma/RecurrentGemmaRMSNorm sapiens2/Sapiens2RMSNorm
seed_oss/SeedOssRMSNorm smollm3/SmolLM3RMSNorm solar_open/SolarOpenRMSNorm step3p7/Step3p7RMSNorm
switch_transformers/SwitchTransformersLayerNorm t5/T5LayerNorm t5gemma/T5GemmaRMSNorm
t5gemma2/T5Gemma2RMSNorm timesfm/TimesFmRMSNorm timesfm2_5/TimesFm2_5RMSNorm udop/UdopLayerNorm
ultrabert/UltrabertRMSNorm ultravbert/UltraVBertRMSNorm umt5/UMT5LayerNorm
unlimited_ocr/UnlimitedOcrTextRMSNorm vaultgemma/VaultGemmaRMSNorm vibevoice/VibeVoiceRMSNorm
vibevoice_acoustic_tokenizer/VibeVoiceAcousticTokenizerRMSNorm vibevoice_asr/VibeVoiceAsrRMSNorm
vitdet/VitDetLayerNorm voxtral_realtime/VoxtralRealtimeRMSNorm xcodec2/Xcodec2RMSNorm
youtu/YoutuRMSNorm zamba/ZambaRMSNorm zamba2/Zamba2RMSNormGated zamba2/Zamba2RMSNorm
zaya/ZayaRMSNorm zaya/ZayaQKNorm
"""


def known_norms() -> tuple[type[nn.Module], ...]:
    """The classes above that have been imported; nothing is imported here."""
    found = []
    for entry in _TRANSFORMERS.split():
        *where, name = entry.split("/")
        path = f"transformers.models.{where[0]}.modeling_{where[-1]}"
        if (kind := imported_class(path, name)) is not None:
            found.append(kind)
    return tuple(found)
