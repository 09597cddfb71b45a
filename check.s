	.file	"check.cpp"
	.file	1 "/usr/include/x86_64-linux-gnu/bits" "types.h"
	.file	2 "/usr/include/x86_64-linux-gnu/bits" "stdint-uintn.h"
	.file	3 "/tmp" "tmp3x4w5nrt/check.cpp"
	.file	4 "/tmp/w" "inst_uv/lib/python3.11/site-packages/ziglang/lib/include/avx512fintrin.h"
	.text
	.globl	_Z5twicePf                      # -- Begin function _Z5twicePf
	.p2align	4
	.type	_Z5twicePf,@function
_Z5twicePf:                             # @_Z5twicePf
.Lfunc_begin0:
	.loc	3 7 0                           # tmp3x4w5nrt/check.cpp:7:0
	.cfi_startproc
# %bb.0:
	pushq	%rbp
	.cfi_def_cfa_offset 16
	.cfi_offset %rbp, -16
	movq	%rsp, %rbp
	.cfi_def_cfa_register %rbp
	andq	$-64, %rsp
	subq	$576, %rsp                      # imm = 0x240
	movq	%rdi, 248(%rsp)
.Ltmp0:
	.loc	3 7 41 prologue_end             # tmp3x4w5nrt/check.cpp:7:41
	movq	248(%rsp), %rax
	movq	%rax, 232(%rsp)                 # 8-byte Spill
	.loc	3 7 74 is_stmt 0                # tmp3x4w5nrt/check.cpp:7:74
	movq	248(%rsp), %rax
	.loc	3 7 58                          # tmp3x4w5nrt/check.cpp:7:58
	movq	%rax, 552(%rsp)
	movq	552(%rsp), %rax
	movq	%rax, 240(%rsp)                 # 8-byte Spill
	cmpq	$0, %rax
	jne	.LBB0_2
# %bb.1:
	.loc	3 0 58                          # tmp3x4w5nrt/check.cpp:0:58
	movq	240(%rsp), %rsi                 # 8-byte Reload
	.loc	3 7 58                          # tmp3x4w5nrt/check.cpp:7:58
	leaq	.L__unnamed_1(%rip), %rdi
	callq	__ubsan_handle_type_mismatch_v1@PLT
.LBB0_2:
	.loc	3 0 58                          # tmp3x4w5nrt/check.cpp:0:58
	movq	240(%rsp), %rax                 # 8-byte Reload
	.loc	3 7 58                          # tmp3x4w5nrt/check.cpp:7:58
	cmpq	$0, %rax
	jne	.LBB0_4
# %bb.3:
	.loc	3 0 58                          # tmp3x4w5nrt/check.cpp:0:58
	movq	240(%rsp), %rsi                 # 8-byte Reload
	.loc	3 7 58                          # tmp3x4w5nrt/check.cpp:7:58
	leaq	.L__unnamed_2(%rip), %rdi
	callq	__ubsan_handle_type_mismatch_v1@PLT
.LBB0_4:
	.loc	3 0 58                          # tmp3x4w5nrt/check.cpp:0:58
	movq	240(%rsp), %rax                 # 8-byte Reload
	.loc	3 7 58                          # tmp3x4w5nrt/check.cpp:7:58
	vmovups	(%rax), %zmm0
	vmovaps	%zmm0, 128(%rsp)                # 64-byte Spill
	.loc	3 7 94                          # tmp3x4w5nrt/check.cpp:7:94
	movq	248(%rsp), %rax
	.loc	3 7 78                          # tmp3x4w5nrt/check.cpp:7:78
	movq	%rax, 544(%rsp)
	movq	544(%rsp), %rax
	movq	%rax, 224(%rsp)                 # 8-byte Spill
	cmpq	$0, %rax
	jne	.LBB0_6
# %bb.5:
	.loc	3 0 78                          # tmp3x4w5nrt/check.cpp:0:78
	movq	224(%rsp), %rsi                 # 8-byte Reload
	.loc	3 7 78                          # tmp3x4w5nrt/check.cpp:7:78
	leaq	.L__unnamed_1(%rip), %rdi
	vzeroupper
	callq	__ubsan_handle_type_mismatch_v1@PLT
.LBB0_6:
	.loc	3 0 78                          # tmp3x4w5nrt/check.cpp:0:78
	movq	224(%rsp), %rax                 # 8-byte Reload
	.loc	3 7 78                          # tmp3x4w5nrt/check.cpp:7:78
	cmpq	$0, %rax
	jne	.LBB0_8
# %bb.7:
	.loc	3 0 78                          # tmp3x4w5nrt/check.cpp:0:78
	movq	224(%rsp), %rsi                 # 8-byte Reload
	.loc	3 7 78                          # tmp3x4w5nrt/check.cpp:7:78
	leaq	.L__unnamed_2(%rip), %rdi
	vzeroupper
	callq	__ubsan_handle_type_mismatch_v1@PLT
.LBB0_8:
	.loc	3 0 78                          # tmp3x4w5nrt/check.cpp:0:78
	movq	232(%rsp), %rax                 # 8-byte Reload
	vmovaps	128(%rsp), %zmm1                # 64-byte Reload
	movq	224(%rsp), %rcx                 # 8-byte Reload
	.loc	3 7 78                          # tmp3x4w5nrt/check.cpp:7:78
	vmovups	(%rcx), %zmm0
	.loc	3 7 44                          # tmp3x4w5nrt/check.cpp:7:44
	vmovaps	%zmm1, 448(%rsp)
	vmovaps	%zmm0, 384(%rsp)
	vmovaps	448(%rsp), %zmm0
	vaddps	384(%rsp), %zmm0, %zmm0
	.loc	3 7 24                          # tmp3x4w5nrt/check.cpp:7:24
	movq	%rax, 376(%rsp)
	vmovaps	%zmm0, 256(%rsp)
	vmovaps	256(%rsp), %zmm0
	vmovaps	%zmm0, (%rsp)                   # 64-byte Spill
	movq	376(%rsp), %rax
	movq	%rax, 120(%rsp)                 # 8-byte Spill
	cmpq	$0, %rax
	jne	.LBB0_10
# %bb.9:
	.loc	3 0 24                          # tmp3x4w5nrt/check.cpp:0:24
	movq	120(%rsp), %rsi                 # 8-byte Reload
	.loc	3 7 24                          # tmp3x4w5nrt/check.cpp:7:24
	leaq	.L__unnamed_3(%rip), %rdi
	vzeroupper
	callq	__ubsan_handle_type_mismatch_v1@PLT
.LBB0_10:
	.loc	3 0 24                          # tmp3x4w5nrt/check.cpp:0:24
	movq	120(%rsp), %rax                 # 8-byte Reload
	.loc	3 7 24                          # tmp3x4w5nrt/check.cpp:7:24
	cmpq	$0, %rax
	jne	.LBB0_12
# %bb.11:
	.loc	3 0 24                          # tmp3x4w5nrt/check.cpp:0:24
	movq	120(%rsp), %rsi                 # 8-byte Reload
	.loc	3 7 24                          # tmp3x4w5nrt/check.cpp:7:24
	leaq	.L__unnamed_4(%rip), %rdi
	vzeroupper
	callq	__ubsan_handle_type_mismatch_v1@PLT
.LBB0_12:
	.loc	3 0 24                          # tmp3x4w5nrt/check.cpp:0:24
	movq	120(%rsp), %rax                 # 8-byte Reload
	vmovaps	(%rsp), %zmm0                   # 64-byte Reload
	.loc	3 7 24                          # tmp3x4w5nrt/check.cpp:7:24
	vmovups	%zmm0, (%rax)
	.loc	3 7 100                         # tmp3x4w5nrt/check.cpp:7:100
	movq	%rbp, %rsp
	.loc	3 7 100 epilogue_begin          # tmp3x4w5nrt/check.cpp:7:100
	popq	%rbp
	.cfi_def_cfa %rsp, 8
	vzeroupper
	retq
.Ltmp1:
.Lfunc_end0:
	.size	_Z5twicePf, .Lfunc_end0-_Z5twicePf
	.cfi_endproc
                                        # -- End function
	.type	one,@object                     # @one
	.data
	.globl	one
	.p2align	2, 0x0
one:
	.long	1                               # 0x1
	.size	one, 4

	.type	.L.src,@object                  # @.src
	.section	.rodata.str1.1,"aMS",@progbits,1
.L.src:
	.asciz	"/tmp/w/inst_uv/lib/python3.11/site-packages/ziglang/lib/include/avx512fintrin.h"
	.size	.L.src, 80

	.type	.L__unnamed_5,@object           # @0
	.section	.rodata,"a",@progbits
	.p2align	4, 0x0
.L__unnamed_5:
	.short	65535                           # 0xffff
	.short	0                               # 0x0
	.asciz	"'struct __storeu_ps'"
	.zero	1
	.size	.L__unnamed_5, 26

	.type	.L__unnamed_3,@object           # @1
	.data
	.p2align	4, 0x0
.L__unnamed_3:
	.quad	.L.src
	.long	4305                            # 0x10d1
	.long	31                              # 0x1f
	.quad	.L__unnamed_5
	.byte	0                               # 0x0
	.byte	3                               # 0x3
	.zero	6
	.size	.L__unnamed_3, 32

	.type	.L__unnamed_6,@object           # @2
	.section	.rodata,"a",@progbits
	.p2align	4, 0x0
.L__unnamed_6:
	.short	65535                           # 0xffff
	.short	0                               # 0x0
	.asciz	"'__m512_u' (vector of 16 'float' values)"
	.zero	1
	.size	.L__unnamed_6, 46

	.type	.L__unnamed_4,@object           # @3
	.data
	.p2align	4, 0x0
.L__unnamed_4:
	.quad	.L.src
	.long	4305                            # 0x10d1
	.long	31                              # 0x1f
	.quad	.L__unnamed_6
	.byte	0                               # 0x0
	.byte	1                               # 0x1
	.zero	6
	.size	.L__unnamed_4, 32

	.type	.L__unnamed_7,@object           # @4
	.section	.rodata,"a",@progbits
	.p2align	4, 0x0
.L__unnamed_7:
	.short	65535                           # 0xffff
	.short	0                               # 0x0
	.asciz	"'const struct __loadu_ps'"
	.size	.L__unnamed_7, 30

	.type	.L__unnamed_1,@object           # @5
	.data
	.p2align	4, 0x0
.L__unnamed_1:
	.quad	.L.src
	.long	4167                            # 0x1047
	.long	43                              # 0x2b
	.quad	.L__unnamed_7
	.byte	0                               # 0x0
	.byte	3                               # 0x3
	.zero	6
	.size	.L__unnamed_1, 32

	.type	.L__unnamed_8,@object           # @6
	.section	.rodata,"a",@progbits
	.p2align	4, 0x0
.L__unnamed_8:
	.short	65535                           # 0xffff
	.short	0                               # 0x0
	.asciz	"'const __m512_u' (vector of 16 'float' values)"
	.zero	1
	.size	.L__unnamed_8, 52

	.type	.L__unnamed_2,@object           # @7
	.data
	.p2align	4, 0x0
.L__unnamed_2:
	.quad	.L.src
	.long	4167                            # 0x1047
	.long	43                              # 0x2b
	.quad	.L__unnamed_8
	.byte	0                               # 0x0
	.byte	0                               # 0x0
	.zero	6
	.size	.L__unnamed_2, 32

	.file	5 "/usr/include/x86_64-linux-gnu/bits" "stdint-intn.h"
	.file	6 "/tmp/w" "inst_uv/lib/python3.11/site-packages/ziglang/lib/libcxx/include/cstdint"
	.file	7 "/usr/include" "stdint.h"
	.section	.debug_abbrev,"",@progbits
	.byte	1                               # Abbreviation Code
	.byte	17                              # DW_TAG_compile_unit
	.byte	1                               # DW_CHILDREN_yes
	.byte	37                              # DW_AT_producer
	.byte	14                              # DW_FORM_strp
	.byte	19                              # DW_AT_language
	.byte	5                               # DW_FORM_data2
	.byte	3                               # DW_AT_name
	.byte	14                              # DW_FORM_strp
	.byte	16                              # DW_AT_stmt_list
	.byte	23                              # DW_FORM_sec_offset
	.byte	27                              # DW_AT_comp_dir
	.byte	14                              # DW_FORM_strp
	.byte	17                              # DW_AT_low_pc
	.byte	1                               # DW_FORM_addr
	.byte	18                              # DW_AT_high_pc
	.byte	6                               # DW_FORM_data4
	.byte	0                               # EOM(1)
	.byte	0                               # EOM(2)
	.byte	2                               # Abbreviation Code
	.byte	52                              # DW_TAG_variable
	.byte	0                               # DW_CHILDREN_no
	.byte	3                               # DW_AT_name
	.byte	14                              # DW_FORM_strp
	.byte	73                              # DW_AT_type
	.byte	19                              # DW_FORM_ref4
	.byte	63                              # DW_AT_external
	.byte	25                              # DW_FORM_flag_present
	.byte	58                              # DW_AT_decl_file
	.byte	11                              # DW_FORM_data1
	.byte	59                              # DW_AT_decl_line
	.byte	11                              # DW_FORM_data1
	.byte	2                               # DW_AT_location
	.byte	24                              # DW_FORM_exprloc
	.byte	0                               # EOM(1)
	.byte	0                               # EOM(2)
	.byte	3                               # Abbreviation Code
	.byte	22                              # DW_TAG_typedef
	.byte	0                               # DW_CHILDREN_no
	.byte	73                              # DW_AT_type
	.byte	19                              # DW_FORM_ref4
	.byte	3                               # DW_AT_name
	.byte	14                              # DW_FORM_strp
	.byte	58                              # DW_AT_decl_file
	.byte	11                              # DW_FORM_data1
	.byte	59                              # DW_AT_decl_line
	.byte	11                              # DW_FORM_data1
	.byte	0                               # EOM(1)
	.byte	0                               # EOM(2)
	.byte	4                               # Abbreviation Code
	.byte	36                              # DW_TAG_base_type
	.byte	0                               # DW_CHILDREN_no
	.byte	3                               # DW_AT_name
	.byte	14                              # DW_FORM_strp
	.byte	62                              # DW_AT_encoding
	.byte	11                              # DW_FORM_data1
	.byte	11                              # DW_AT_byte_size
	.byte	11                              # DW_FORM_data1
	.byte	0                               # EOM(1)
	.byte	0                               # EOM(2)
	.byte	5                               # Abbreviation Code
	.byte	15                              # DW_TAG_pointer_type
	.byte	0                               # DW_CHILDREN_no
	.byte	73                              # DW_AT_type
	.byte	19                              # DW_FORM_ref4
	.byte	0                               # EOM(1)
	.byte	0                               # EOM(2)
	.byte	6                               # Abbreviation Code
	.byte	19                              # DW_TAG_structure_type
	.byte	1                               # DW_CHILDREN_yes
	.byte	54                              # DW_AT_calling_convention
	.byte	11                              # DW_FORM_data1
	.byte	3                               # DW_AT_name
	.byte	14                              # DW_FORM_strp
	.byte	11                              # DW_AT_byte_size
	.byte	11                              # DW_FORM_data1
	.byte	58                              # DW_AT_decl_file
	.byte	11                              # DW_FORM_data1
	.byte	59                              # DW_AT_decl_line
	.byte	5                               # DW_FORM_data2
	.byte	0                               # EOM(1)
	.byte	0                               # EOM(2)
	.byte	7                               # Abbreviation Code
	.byte	13                              # DW_TAG_member
	.byte	0                               # DW_CHILDREN_no
	.byte	3                               # DW_AT_name
	.byte	14                              # DW_FORM_strp
	.byte	73                              # DW_AT_type
	.byte	19                              # DW_FORM_ref4
	.byte	58                              # DW_AT_decl_file
	.byte	11                              # DW_FORM_data1
	.byte	59                              # DW_AT_decl_line
	.byte	5                               # DW_FORM_data2
	.ascii	"\210\001"                      # DW_AT_alignment
	.byte	15                              # DW_FORM_udata
	.byte	56                              # DW_AT_data_member_location
	.byte	11                              # DW_FORM_data1
	.byte	0                               # EOM(1)
	.byte	0                               # EOM(2)
	.byte	8                               # Abbreviation Code
	.byte	1                               # DW_TAG_array_type
	.byte	1                               # DW_CHILDREN_yes
	.ascii	"\207B"                         # DW_AT_GNU_vector
	.byte	25                              # DW_FORM_flag_present
	.byte	73                              # DW_AT_type
	.byte	19                              # DW_FORM_ref4
	.byte	0                               # EOM(1)
	.byte	0                               # EOM(2)
	.byte	9                               # Abbreviation Code
	.byte	33                              # DW_TAG_subrange_type
	.byte	0                               # DW_CHILDREN_no
	.byte	73                              # DW_AT_type
	.byte	19                              # DW_FORM_ref4
	.byte	55                              # DW_AT_count
	.byte	11                              # DW_FORM_data1
	.byte	0                               # EOM(1)
	.byte	0                               # EOM(2)
	.byte	10                              # Abbreviation Code
	.byte	36                              # DW_TAG_base_type
	.byte	0                               # DW_CHILDREN_no
	.byte	3                               # DW_AT_name
	.byte	14                              # DW_FORM_strp
	.byte	11                              # DW_AT_byte_size
	.byte	11                              # DW_FORM_data1
	.byte	62                              # DW_AT_encoding
	.byte	11                              # DW_FORM_data1
	.byte	0                               # EOM(1)
	.byte	0                               # EOM(2)
	.byte	11                              # Abbreviation Code
	.byte	38                              # DW_TAG_const_type
	.byte	0                               # DW_CHILDREN_no
	.byte	73                              # DW_AT_type
	.byte	19                              # DW_FORM_ref4
	.byte	0                               # EOM(1)
	.byte	0                               # EOM(2)
	.byte	12                              # Abbreviation Code
	.byte	46                              # DW_TAG_subprogram
	.byte	1                               # DW_CHILDREN_yes
	.byte	17                              # DW_AT_low_pc
	.byte	1                               # DW_FORM_addr
	.byte	18                              # DW_AT_high_pc
	.byte	6                               # DW_FORM_data4
	.byte	64                              # DW_AT_frame_base
	.byte	24                              # DW_FORM_exprloc
	.byte	110                             # DW_AT_linkage_name
	.byte	14                              # DW_FORM_strp
	.byte	3                               # DW_AT_name
	.byte	14                              # DW_FORM_strp
	.byte	58                              # DW_AT_decl_file
	.byte	11                              # DW_FORM_data1
	.byte	59                              # DW_AT_decl_line
	.byte	11                              # DW_FORM_data1
	.byte	63                              # DW_AT_external
	.byte	25                              # DW_FORM_flag_present
	.byte	0                               # EOM(1)
	.byte	0                               # EOM(2)
	.byte	13                              # Abbreviation Code
	.byte	5                               # DW_TAG_formal_parameter
	.byte	0                               # DW_CHILDREN_no
	.byte	2                               # DW_AT_location
	.byte	24                              # DW_FORM_exprloc
	.byte	3                               # DW_AT_name
	.byte	14                              # DW_FORM_strp
	.byte	58                              # DW_AT_decl_file
	.byte	11                              # DW_FORM_data1
	.byte	59                              # DW_AT_decl_line
	.byte	11                              # DW_FORM_data1
	.byte	73                              # DW_AT_type
	.byte	19                              # DW_FORM_ref4
	.byte	0                               # EOM(1)
	.byte	0                               # EOM(2)
	.byte	14                              # Abbreviation Code
	.byte	57                              # DW_TAG_namespace
	.byte	1                               # DW_CHILDREN_yes
	.byte	3                               # DW_AT_name
	.byte	14                              # DW_FORM_strp
	.byte	0                               # EOM(1)
	.byte	0                               # EOM(2)
	.byte	15                              # Abbreviation Code
	.byte	57                              # DW_TAG_namespace
	.byte	1                               # DW_CHILDREN_yes
	.byte	3                               # DW_AT_name
	.byte	14                              # DW_FORM_strp
	.ascii	"\211\001"                      # DW_AT_export_symbols
	.byte	25                              # DW_FORM_flag_present
	.byte	0                               # EOM(1)
	.byte	0                               # EOM(2)
	.byte	16                              # Abbreviation Code
	.byte	8                               # DW_TAG_imported_declaration
	.byte	0                               # DW_CHILDREN_no
	.byte	58                              # DW_AT_decl_file
	.byte	11                              # DW_FORM_data1
	.byte	59                              # DW_AT_decl_line
	.byte	11                              # DW_FORM_data1
	.byte	24                              # DW_AT_import
	.byte	19                              # DW_FORM_ref4
	.byte	0                               # EOM(1)
	.byte	0                               # EOM(2)
	.byte	0                               # EOM(3)
	.section	.debug_info,"",@progbits
.Lcu_begin0:
	.long	.Ldebug_info_end0-.Ldebug_info_start0 # Length of Unit
.Ldebug_info_start0:
	.short	4                               # DWARF version number
	.long	.debug_abbrev                   # Offset Into Abbrev. Section
	.byte	8                               # Address Size (in bytes)
	.byte	1                               # Abbrev [1] 0xb:0x3e1 DW_TAG_compile_unit
	.long	.Linfo_string0                  # DW_AT_producer
	.short	33                              # DW_AT_language
	.long	.Linfo_string1                  # DW_AT_name
	.long	.Lline_table_start0             # DW_AT_stmt_list
	.long	.Linfo_string2                  # DW_AT_comp_dir
	.quad	.Lfunc_begin0                   # DW_AT_low_pc
	.long	.Lfunc_end0-.Lfunc_begin0       # DW_AT_high_pc
	.byte	2                               # Abbrev [2] 0x2a:0x15 DW_TAG_variable
	.long	.Linfo_string3                  # DW_AT_name
	.long	63                              # DW_AT_type
                                        # DW_AT_external
	.byte	3                               # DW_AT_decl_file
	.byte	2                               # DW_AT_decl_line
	.byte	9                               # DW_AT_location
	.byte	3
	.quad	one
	.byte	3                               # Abbrev [3] 0x3f:0xb DW_TAG_typedef
	.long	74                              # DW_AT_type
	.long	.Linfo_string6                  # DW_AT_name
	.byte	2                               # DW_AT_decl_file
	.byte	26                              # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x4a:0xb DW_TAG_typedef
	.long	85                              # DW_AT_type
	.long	.Linfo_string5                  # DW_AT_name
	.byte	1                               # DW_AT_decl_file
	.byte	42                              # DW_AT_decl_line
	.byte	4                               # Abbrev [4] 0x55:0x7 DW_TAG_base_type
	.long	.Linfo_string4                  # DW_AT_name
	.byte	7                               # DW_AT_encoding
	.byte	4                               # DW_AT_byte_size
	.byte	5                               # Abbrev [5] 0x5c:0x5 DW_TAG_pointer_type
	.long	97                              # DW_AT_type
	.byte	6                               # Abbrev [6] 0x61:0x19 DW_TAG_structure_type
	.byte	5                               # DW_AT_calling_convention
	.long	.Linfo_string11                 # DW_AT_name
	.byte	64                              # DW_AT_byte_size
	.byte	4                               # DW_AT_decl_file
	.short	4302                            # DW_AT_decl_line
	.byte	7                               # Abbrev [7] 0x6b:0xe DW_TAG_member
	.long	.Linfo_string7                  # DW_AT_name
	.long	122                             # DW_AT_type
	.byte	4                               # DW_AT_decl_file
	.short	4303                            # DW_AT_decl_line
	.byte	1                               # DW_AT_alignment
	.byte	0                               # DW_AT_data_member_location
	.byte	0                               # End Of Children Mark
	.byte	3                               # Abbrev [3] 0x7a:0xb DW_TAG_typedef
	.long	133                             # DW_AT_type
	.long	.Linfo_string10                 # DW_AT_name
	.byte	4                               # DW_AT_decl_file
	.byte	37                              # DW_AT_decl_line
	.byte	8                               # Abbrev [8] 0x85:0xc DW_TAG_array_type
                                        # DW_AT_GNU_vector
	.long	145                             # DW_AT_type
	.byte	9                               # Abbrev [9] 0x8a:0x6 DW_TAG_subrange_type
	.long	152                             # DW_AT_type
	.byte	16                              # DW_AT_count
	.byte	0                               # End Of Children Mark
	.byte	4                               # Abbrev [4] 0x91:0x7 DW_TAG_base_type
	.long	.Linfo_string8                  # DW_AT_name
	.byte	4                               # DW_AT_encoding
	.byte	4                               # DW_AT_byte_size
	.byte	10                              # Abbrev [10] 0x98:0x7 DW_TAG_base_type
	.long	.Linfo_string9                  # DW_AT_name
	.byte	8                               # DW_AT_byte_size
	.byte	7                               # DW_AT_encoding
	.byte	3                               # Abbrev [3] 0x9f:0xb DW_TAG_typedef
	.long	133                             # DW_AT_type
	.long	.Linfo_string12                 # DW_AT_name
	.byte	4                               # DW_AT_decl_file
	.byte	33                              # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0xaa:0xb DW_TAG_typedef
	.long	133                             # DW_AT_type
	.long	.Linfo_string13                 # DW_AT_name
	.byte	4                               # DW_AT_decl_file
	.byte	19                              # DW_AT_decl_line
	.byte	5                               # Abbrev [5] 0xb5:0x5 DW_TAG_pointer_type
	.long	186                             # DW_AT_type
	.byte	11                              # Abbrev [11] 0xba:0x5 DW_TAG_const_type
	.long	191                             # DW_AT_type
	.byte	6                               # Abbrev [6] 0xbf:0x19 DW_TAG_structure_type
	.byte	5                               # DW_AT_calling_convention
	.long	.Linfo_string14                 # DW_AT_name
	.byte	64                              # DW_AT_byte_size
	.byte	4                               # DW_AT_decl_file
	.short	4164                            # DW_AT_decl_line
	.byte	7                               # Abbrev [7] 0xc9:0xe DW_TAG_member
	.long	.Linfo_string7                  # DW_AT_name
	.long	122                             # DW_AT_type
	.byte	4                               # DW_AT_decl_file
	.short	4165                            # DW_AT_decl_line
	.byte	1                               # DW_AT_alignment
	.byte	0                               # DW_AT_data_member_location
	.byte	0                               # End Of Children Mark
	.byte	12                              # Abbrev [12] 0xd8:0x29 DW_TAG_subprogram
	.quad	.Lfunc_begin0                   # DW_AT_low_pc
	.long	.Lfunc_end0-.Lfunc_begin0       # DW_AT_high_pc
	.byte	1                               # DW_AT_frame_base
	.byte	86
	.long	.Linfo_string68                 # DW_AT_linkage_name
	.long	.Linfo_string69                 # DW_AT_name
	.byte	3                               # DW_AT_decl_file
	.byte	7                               # DW_AT_decl_line
                                        # DW_AT_external
	.byte	13                              # Abbrev [13] 0xf1:0xf DW_TAG_formal_parameter
	.byte	3                               # DW_AT_location
	.byte	119
	.ascii	"\370\001"
	.long	.Linfo_string70                 # DW_AT_name
	.byte	3                               # DW_AT_decl_file
	.byte	7                               # DW_AT_decl_line
	.long	998                             # DW_AT_type
	.byte	0                               # End Of Children Mark
	.byte	14                              # Abbrev [14] 0x101:0xd0 DW_TAG_namespace
	.long	.Linfo_string15                 # DW_AT_name
	.byte	15                              # Abbrev [15] 0x106:0xca DW_TAG_namespace
	.long	.Linfo_string16                 # DW_AT_name
                                        # DW_AT_export_symbols
	.byte	16                              # Abbrev [16] 0x10b:0x7 DW_TAG_imported_declaration
	.byte	6                               # DW_AT_decl_file
	.byte	158                             # DW_AT_decl_line
	.long	465                             # DW_AT_import
	.byte	16                              # Abbrev [16] 0x112:0x7 DW_TAG_imported_declaration
	.byte	6                               # DW_AT_decl_file
	.byte	159                             # DW_AT_decl_line
	.long	494                             # DW_AT_import
	.byte	16                              # Abbrev [16] 0x119:0x7 DW_TAG_imported_declaration
	.byte	6                               # DW_AT_decl_file
	.byte	160                             # DW_AT_decl_line
	.long	523                             # DW_AT_import
	.byte	16                              # Abbrev [16] 0x120:0x7 DW_TAG_imported_declaration
	.byte	6                               # DW_AT_decl_file
	.byte	161                             # DW_AT_decl_line
	.long	552                             # DW_AT_import
	.byte	16                              # Abbrev [16] 0x127:0x7 DW_TAG_imported_declaration
	.byte	6                               # DW_AT_decl_file
	.byte	163                             # DW_AT_decl_line
	.long	581                             # DW_AT_import
	.byte	16                              # Abbrev [16] 0x12e:0x7 DW_TAG_imported_declaration
	.byte	6                               # DW_AT_decl_file
	.byte	164                             # DW_AT_decl_line
	.long	610                             # DW_AT_import
	.byte	16                              # Abbrev [16] 0x135:0x7 DW_TAG_imported_declaration
	.byte	6                               # DW_AT_decl_file
	.byte	165                             # DW_AT_decl_line
	.long	63                              # DW_AT_import
	.byte	16                              # Abbrev [16] 0x13c:0x7 DW_TAG_imported_declaration
	.byte	6                               # DW_AT_decl_file
	.byte	166                             # DW_AT_decl_line
	.long	639                             # DW_AT_import
	.byte	16                              # Abbrev [16] 0x143:0x7 DW_TAG_imported_declaration
	.byte	6                               # DW_AT_decl_file
	.byte	168                             # DW_AT_decl_line
	.long	668                             # DW_AT_import
	.byte	16                              # Abbrev [16] 0x14a:0x7 DW_TAG_imported_declaration
	.byte	6                               # DW_AT_decl_file
	.byte	169                             # DW_AT_decl_line
	.long	690                             # DW_AT_import
	.byte	16                              # Abbrev [16] 0x151:0x7 DW_TAG_imported_declaration
	.byte	6                               # DW_AT_decl_file
	.byte	170                             # DW_AT_decl_line
	.long	712                             # DW_AT_import
	.byte	16                              # Abbrev [16] 0x158:0x7 DW_TAG_imported_declaration
	.byte	6                               # DW_AT_decl_file
	.byte	171                             # DW_AT_decl_line
	.long	734                             # DW_AT_import
	.byte	16                              # Abbrev [16] 0x15f:0x7 DW_TAG_imported_declaration
	.byte	6                               # DW_AT_decl_file
	.byte	173                             # DW_AT_decl_line
	.long	756                             # DW_AT_import
	.byte	16                              # Abbrev [16] 0x166:0x7 DW_TAG_imported_declaration
	.byte	6                               # DW_AT_decl_file
	.byte	174                             # DW_AT_decl_line
	.long	778                             # DW_AT_import
	.byte	16                              # Abbrev [16] 0x16d:0x7 DW_TAG_imported_declaration
	.byte	6                               # DW_AT_decl_file
	.byte	175                             # DW_AT_decl_line
	.long	800                             # DW_AT_import
	.byte	16                              # Abbrev [16] 0x174:0x7 DW_TAG_imported_declaration
	.byte	6                               # DW_AT_decl_file
	.byte	176                             # DW_AT_decl_line
	.long	822                             # DW_AT_import
	.byte	16                              # Abbrev [16] 0x17b:0x7 DW_TAG_imported_declaration
	.byte	6                               # DW_AT_decl_file
	.byte	178                             # DW_AT_decl_line
	.long	844                             # DW_AT_import
	.byte	16                              # Abbrev [16] 0x182:0x7 DW_TAG_imported_declaration
	.byte	6                               # DW_AT_decl_file
	.byte	179                             # DW_AT_decl_line
	.long	855                             # DW_AT_import
	.byte	16                              # Abbrev [16] 0x189:0x7 DW_TAG_imported_declaration
	.byte	6                               # DW_AT_decl_file
	.byte	180                             # DW_AT_decl_line
	.long	866                             # DW_AT_import
	.byte	16                              # Abbrev [16] 0x190:0x7 DW_TAG_imported_declaration
	.byte	6                               # DW_AT_decl_file
	.byte	181                             # DW_AT_decl_line
	.long	877                             # DW_AT_import
	.byte	16                              # Abbrev [16] 0x197:0x7 DW_TAG_imported_declaration
	.byte	6                               # DW_AT_decl_file
	.byte	183                             # DW_AT_decl_line
	.long	888                             # DW_AT_import
	.byte	16                              # Abbrev [16] 0x19e:0x7 DW_TAG_imported_declaration
	.byte	6                               # DW_AT_decl_file
	.byte	184                             # DW_AT_decl_line
	.long	899                             # DW_AT_import
	.byte	16                              # Abbrev [16] 0x1a5:0x7 DW_TAG_imported_declaration
	.byte	6                               # DW_AT_decl_file
	.byte	185                             # DW_AT_decl_line
	.long	910                             # DW_AT_import
	.byte	16                              # Abbrev [16] 0x1ac:0x7 DW_TAG_imported_declaration
	.byte	6                               # DW_AT_decl_file
	.byte	186                             # DW_AT_decl_line
	.long	921                             # DW_AT_import
	.byte	16                              # Abbrev [16] 0x1b3:0x7 DW_TAG_imported_declaration
	.byte	6                               # DW_AT_decl_file
	.byte	188                             # DW_AT_decl_line
	.long	932                             # DW_AT_import
	.byte	16                              # Abbrev [16] 0x1ba:0x7 DW_TAG_imported_declaration
	.byte	6                               # DW_AT_decl_file
	.byte	189                             # DW_AT_decl_line
	.long	943                             # DW_AT_import
	.byte	16                              # Abbrev [16] 0x1c1:0x7 DW_TAG_imported_declaration
	.byte	6                               # DW_AT_decl_file
	.byte	191                             # DW_AT_decl_line
	.long	954                             # DW_AT_import
	.byte	16                              # Abbrev [16] 0x1c8:0x7 DW_TAG_imported_declaration
	.byte	6                               # DW_AT_decl_file
	.byte	192                             # DW_AT_decl_line
	.long	976                             # DW_AT_import
	.byte	0                               # End Of Children Mark
	.byte	0                               # End Of Children Mark
	.byte	3                               # Abbrev [3] 0x1d1:0xb DW_TAG_typedef
	.long	476                             # DW_AT_type
	.long	.Linfo_string19                 # DW_AT_name
	.byte	5                               # DW_AT_decl_file
	.byte	24                              # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x1dc:0xb DW_TAG_typedef
	.long	487                             # DW_AT_type
	.long	.Linfo_string18                 # DW_AT_name
	.byte	1                               # DW_AT_decl_file
	.byte	37                              # DW_AT_decl_line
	.byte	4                               # Abbrev [4] 0x1e7:0x7 DW_TAG_base_type
	.long	.Linfo_string17                 # DW_AT_name
	.byte	6                               # DW_AT_encoding
	.byte	1                               # DW_AT_byte_size
	.byte	3                               # Abbrev [3] 0x1ee:0xb DW_TAG_typedef
	.long	505                             # DW_AT_type
	.long	.Linfo_string22                 # DW_AT_name
	.byte	5                               # DW_AT_decl_file
	.byte	25                              # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x1f9:0xb DW_TAG_typedef
	.long	516                             # DW_AT_type
	.long	.Linfo_string21                 # DW_AT_name
	.byte	1                               # DW_AT_decl_file
	.byte	39                              # DW_AT_decl_line
	.byte	4                               # Abbrev [4] 0x204:0x7 DW_TAG_base_type
	.long	.Linfo_string20                 # DW_AT_name
	.byte	5                               # DW_AT_encoding
	.byte	2                               # DW_AT_byte_size
	.byte	3                               # Abbrev [3] 0x20b:0xb DW_TAG_typedef
	.long	534                             # DW_AT_type
	.long	.Linfo_string25                 # DW_AT_name
	.byte	5                               # DW_AT_decl_file
	.byte	26                              # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x216:0xb DW_TAG_typedef
	.long	545                             # DW_AT_type
	.long	.Linfo_string24                 # DW_AT_name
	.byte	1                               # DW_AT_decl_file
	.byte	41                              # DW_AT_decl_line
	.byte	4                               # Abbrev [4] 0x221:0x7 DW_TAG_base_type
	.long	.Linfo_string23                 # DW_AT_name
	.byte	5                               # DW_AT_encoding
	.byte	4                               # DW_AT_byte_size
	.byte	3                               # Abbrev [3] 0x228:0xb DW_TAG_typedef
	.long	563                             # DW_AT_type
	.long	.Linfo_string28                 # DW_AT_name
	.byte	5                               # DW_AT_decl_file
	.byte	27                              # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x233:0xb DW_TAG_typedef
	.long	574                             # DW_AT_type
	.long	.Linfo_string27                 # DW_AT_name
	.byte	1                               # DW_AT_decl_file
	.byte	44                              # DW_AT_decl_line
	.byte	4                               # Abbrev [4] 0x23e:0x7 DW_TAG_base_type
	.long	.Linfo_string26                 # DW_AT_name
	.byte	5                               # DW_AT_encoding
	.byte	8                               # DW_AT_byte_size
	.byte	3                               # Abbrev [3] 0x245:0xb DW_TAG_typedef
	.long	592                             # DW_AT_type
	.long	.Linfo_string31                 # DW_AT_name
	.byte	2                               # DW_AT_decl_file
	.byte	24                              # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x250:0xb DW_TAG_typedef
	.long	603                             # DW_AT_type
	.long	.Linfo_string30                 # DW_AT_name
	.byte	1                               # DW_AT_decl_file
	.byte	38                              # DW_AT_decl_line
	.byte	4                               # Abbrev [4] 0x25b:0x7 DW_TAG_base_type
	.long	.Linfo_string29                 # DW_AT_name
	.byte	8                               # DW_AT_encoding
	.byte	1                               # DW_AT_byte_size
	.byte	3                               # Abbrev [3] 0x262:0xb DW_TAG_typedef
	.long	621                             # DW_AT_type
	.long	.Linfo_string34                 # DW_AT_name
	.byte	2                               # DW_AT_decl_file
	.byte	25                              # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x26d:0xb DW_TAG_typedef
	.long	632                             # DW_AT_type
	.long	.Linfo_string33                 # DW_AT_name
	.byte	1                               # DW_AT_decl_file
	.byte	40                              # DW_AT_decl_line
	.byte	4                               # Abbrev [4] 0x278:0x7 DW_TAG_base_type
	.long	.Linfo_string32                 # DW_AT_name
	.byte	7                               # DW_AT_encoding
	.byte	2                               # DW_AT_byte_size
	.byte	3                               # Abbrev [3] 0x27f:0xb DW_TAG_typedef
	.long	650                             # DW_AT_type
	.long	.Linfo_string37                 # DW_AT_name
	.byte	2                               # DW_AT_decl_file
	.byte	27                              # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x28a:0xb DW_TAG_typedef
	.long	661                             # DW_AT_type
	.long	.Linfo_string36                 # DW_AT_name
	.byte	1                               # DW_AT_decl_file
	.byte	45                              # DW_AT_decl_line
	.byte	4                               # Abbrev [4] 0x295:0x7 DW_TAG_base_type
	.long	.Linfo_string35                 # DW_AT_name
	.byte	7                               # DW_AT_encoding
	.byte	8                               # DW_AT_byte_size
	.byte	3                               # Abbrev [3] 0x29c:0xb DW_TAG_typedef
	.long	679                             # DW_AT_type
	.long	.Linfo_string39                 # DW_AT_name
	.byte	7                               # DW_AT_decl_file
	.byte	43                              # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x2a7:0xb DW_TAG_typedef
	.long	476                             # DW_AT_type
	.long	.Linfo_string38                 # DW_AT_name
	.byte	1                               # DW_AT_decl_file
	.byte	52                              # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x2b2:0xb DW_TAG_typedef
	.long	701                             # DW_AT_type
	.long	.Linfo_string41                 # DW_AT_name
	.byte	7                               # DW_AT_decl_file
	.byte	44                              # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x2bd:0xb DW_TAG_typedef
	.long	505                             # DW_AT_type
	.long	.Linfo_string40                 # DW_AT_name
	.byte	1                               # DW_AT_decl_file
	.byte	54                              # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x2c8:0xb DW_TAG_typedef
	.long	723                             # DW_AT_type
	.long	.Linfo_string43                 # DW_AT_name
	.byte	7                               # DW_AT_decl_file
	.byte	45                              # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x2d3:0xb DW_TAG_typedef
	.long	534                             # DW_AT_type
	.long	.Linfo_string42                 # DW_AT_name
	.byte	1                               # DW_AT_decl_file
	.byte	56                              # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x2de:0xb DW_TAG_typedef
	.long	745                             # DW_AT_type
	.long	.Linfo_string45                 # DW_AT_name
	.byte	7                               # DW_AT_decl_file
	.byte	46                              # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x2e9:0xb DW_TAG_typedef
	.long	563                             # DW_AT_type
	.long	.Linfo_string44                 # DW_AT_name
	.byte	1                               # DW_AT_decl_file
	.byte	58                              # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x2f4:0xb DW_TAG_typedef
	.long	767                             # DW_AT_type
	.long	.Linfo_string47                 # DW_AT_name
	.byte	7                               # DW_AT_decl_file
	.byte	49                              # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x2ff:0xb DW_TAG_typedef
	.long	592                             # DW_AT_type
	.long	.Linfo_string46                 # DW_AT_name
	.byte	1                               # DW_AT_decl_file
	.byte	53                              # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x30a:0xb DW_TAG_typedef
	.long	789                             # DW_AT_type
	.long	.Linfo_string49                 # DW_AT_name
	.byte	7                               # DW_AT_decl_file
	.byte	50                              # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x315:0xb DW_TAG_typedef
	.long	621                             # DW_AT_type
	.long	.Linfo_string48                 # DW_AT_name
	.byte	1                               # DW_AT_decl_file
	.byte	55                              # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x320:0xb DW_TAG_typedef
	.long	811                             # DW_AT_type
	.long	.Linfo_string51                 # DW_AT_name
	.byte	7                               # DW_AT_decl_file
	.byte	51                              # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x32b:0xb DW_TAG_typedef
	.long	74                              # DW_AT_type
	.long	.Linfo_string50                 # DW_AT_name
	.byte	1                               # DW_AT_decl_file
	.byte	57                              # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x336:0xb DW_TAG_typedef
	.long	833                             # DW_AT_type
	.long	.Linfo_string53                 # DW_AT_name
	.byte	7                               # DW_AT_decl_file
	.byte	52                              # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x341:0xb DW_TAG_typedef
	.long	650                             # DW_AT_type
	.long	.Linfo_string52                 # DW_AT_name
	.byte	1                               # DW_AT_decl_file
	.byte	59                              # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x34c:0xb DW_TAG_typedef
	.long	487                             # DW_AT_type
	.long	.Linfo_string54                 # DW_AT_name
	.byte	7                               # DW_AT_decl_file
	.byte	58                              # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x357:0xb DW_TAG_typedef
	.long	574                             # DW_AT_type
	.long	.Linfo_string55                 # DW_AT_name
	.byte	7                               # DW_AT_decl_file
	.byte	60                              # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x362:0xb DW_TAG_typedef
	.long	574                             # DW_AT_type
	.long	.Linfo_string56                 # DW_AT_name
	.byte	7                               # DW_AT_decl_file
	.byte	61                              # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x36d:0xb DW_TAG_typedef
	.long	574                             # DW_AT_type
	.long	.Linfo_string57                 # DW_AT_name
	.byte	7                               # DW_AT_decl_file
	.byte	62                              # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x378:0xb DW_TAG_typedef
	.long	603                             # DW_AT_type
	.long	.Linfo_string58                 # DW_AT_name
	.byte	7                               # DW_AT_decl_file
	.byte	71                              # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x383:0xb DW_TAG_typedef
	.long	661                             # DW_AT_type
	.long	.Linfo_string59                 # DW_AT_name
	.byte	7                               # DW_AT_decl_file
	.byte	73                              # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x38e:0xb DW_TAG_typedef
	.long	661                             # DW_AT_type
	.long	.Linfo_string60                 # DW_AT_name
	.byte	7                               # DW_AT_decl_file
	.byte	74                              # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x399:0xb DW_TAG_typedef
	.long	661                             # DW_AT_type
	.long	.Linfo_string61                 # DW_AT_name
	.byte	7                               # DW_AT_decl_file
	.byte	75                              # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x3a4:0xb DW_TAG_typedef
	.long	574                             # DW_AT_type
	.long	.Linfo_string62                 # DW_AT_name
	.byte	7                               # DW_AT_decl_file
	.byte	87                              # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x3af:0xb DW_TAG_typedef
	.long	661                             # DW_AT_type
	.long	.Linfo_string63                 # DW_AT_name
	.byte	7                               # DW_AT_decl_file
	.byte	90                              # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x3ba:0xb DW_TAG_typedef
	.long	965                             # DW_AT_type
	.long	.Linfo_string65                 # DW_AT_name
	.byte	7                               # DW_AT_decl_file
	.byte	101                             # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x3c5:0xb DW_TAG_typedef
	.long	574                             # DW_AT_type
	.long	.Linfo_string64                 # DW_AT_name
	.byte	1                               # DW_AT_decl_file
	.byte	72                              # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x3d0:0xb DW_TAG_typedef
	.long	987                             # DW_AT_type
	.long	.Linfo_string67                 # DW_AT_name
	.byte	7                               # DW_AT_decl_file
	.byte	102                             # DW_AT_decl_line
	.byte	3                               # Abbrev [3] 0x3db:0xb DW_TAG_typedef
	.long	661                             # DW_AT_type
	.long	.Linfo_string66                 # DW_AT_name
	.byte	1                               # DW_AT_decl_file
	.byte	73                              # DW_AT_decl_line
	.byte	5                               # Abbrev [5] 0x3e6:0x5 DW_TAG_pointer_type
	.long	145                             # DW_AT_type
	.byte	0                               # End Of Children Mark
.Ldebug_info_end0:
	.section	.debug_str,"MS",@progbits,1
.Linfo_string0:
	.asciz	"clang version 22.1.8"          # string offset=0
.Linfo_string1:
	.asciz	"/tmp/tmp3x4w5nrt/check.cpp"    # string offset=21
.Linfo_string2:
	.asciz	"/tmp/w/inst"                   # string offset=48
.Linfo_string3:
	.asciz	"one"                           # string offset=60
.Linfo_string4:
	.asciz	"unsigned int"                  # string offset=64
.Linfo_string5:
	.asciz	"__uint32_t"                    # string offset=77
.Linfo_string6:
	.asciz	"uint32_t"                      # string offset=88
.Linfo_string7:
	.asciz	"__v"                           # string offset=97
.Linfo_string8:
	.asciz	"float"                         # string offset=101
.Linfo_string9:
	.asciz	"__ARRAY_SIZE_TYPE__"           # string offset=107
.Linfo_string10:
	.asciz	"__m512_u"                      # string offset=127
.Linfo_string11:
	.asciz	"__storeu_ps"                   # string offset=136
.Linfo_string12:
	.asciz	"__m512"                        # string offset=148
.Linfo_string13:
	.asciz	"__v16sf"                       # string offset=155
.Linfo_string14:
	.asciz	"__loadu_ps"                    # string offset=163
.Linfo_string15:
	.asciz	"std"                           # string offset=174
.Linfo_string16:
	.asciz	"__1"                           # string offset=178
.Linfo_string17:
	.asciz	"signed char"                   # string offset=182
.Linfo_string18:
	.asciz	"__int8_t"                      # string offset=194
.Linfo_string19:
	.asciz	"int8_t"                        # string offset=203
.Linfo_string20:
	.asciz	"short"                         # string offset=210
.Linfo_string21:
	.asciz	"__int16_t"                     # string offset=216
.Linfo_string22:
	.asciz	"int16_t"                       # string offset=226
.Linfo_string23:
	.asciz	"int"                           # string offset=234
.Linfo_string24:
	.asciz	"__int32_t"                     # string offset=238
.Linfo_string25:
	.asciz	"int32_t"                       # string offset=248
.Linfo_string26:
	.asciz	"long"                          # string offset=256
.Linfo_string27:
	.asciz	"__int64_t"                     # string offset=261
.Linfo_string28:
	.asciz	"int64_t"                       # string offset=271
.Linfo_string29:
	.asciz	"unsigned char"                 # string offset=279
.Linfo_string30:
	.asciz	"__uint8_t"                     # string offset=293
.Linfo_string31:
	.asciz	"uint8_t"                       # string offset=303
.Linfo_string32:
	.asciz	"unsigned short"                # string offset=311
.Linfo_string33:
	.asciz	"__uint16_t"                    # string offset=326
.Linfo_string34:
	.asciz	"uint16_t"                      # string offset=337
.Linfo_string35:
	.asciz	"unsigned long"                 # string offset=346
.Linfo_string36:
	.asciz	"__uint64_t"                    # string offset=360
.Linfo_string37:
	.asciz	"uint64_t"                      # string offset=371
.Linfo_string38:
	.asciz	"__int_least8_t"                # string offset=380
.Linfo_string39:
	.asciz	"int_least8_t"                  # string offset=395
.Linfo_string40:
	.asciz	"__int_least16_t"               # string offset=408
.Linfo_string41:
	.asciz	"int_least16_t"                 # string offset=424
.Linfo_string42:
	.asciz	"__int_least32_t"               # string offset=438
.Linfo_string43:
	.asciz	"int_least32_t"                 # string offset=454
.Linfo_string44:
	.asciz	"__int_least64_t"               # string offset=468
.Linfo_string45:
	.asciz	"int_least64_t"                 # string offset=484
.Linfo_string46:
	.asciz	"__uint_least8_t"               # string offset=498
.Linfo_string47:
	.asciz	"uint_least8_t"                 # string offset=514
.Linfo_string48:
	.asciz	"__uint_least16_t"              # string offset=528
.Linfo_string49:
	.asciz	"uint_least16_t"                # string offset=545
.Linfo_string50:
	.asciz	"__uint_least32_t"              # string offset=560
.Linfo_string51:
	.asciz	"uint_least32_t"                # string offset=577
.Linfo_string52:
	.asciz	"__uint_least64_t"              # string offset=592
.Linfo_string53:
	.asciz	"uint_least64_t"                # string offset=609
.Linfo_string54:
	.asciz	"int_fast8_t"                   # string offset=624
.Linfo_string55:
	.asciz	"int_fast16_t"                  # string offset=636
.Linfo_string56:
	.asciz	"int_fast32_t"                  # string offset=649
.Linfo_string57:
	.asciz	"int_fast64_t"                  # string offset=662
.Linfo_string58:
	.asciz	"uint_fast8_t"                  # string offset=675
.Linfo_string59:
	.asciz	"uint_fast16_t"                 # string offset=688
.Linfo_string60:
	.asciz	"uint_fast32_t"                 # string offset=702
.Linfo_string61:
	.asciz	"uint_fast64_t"                 # string offset=716
.Linfo_string62:
	.asciz	"intptr_t"                      # string offset=730
.Linfo_string63:
	.asciz	"uintptr_t"                     # string offset=739
.Linfo_string64:
	.asciz	"__intmax_t"                    # string offset=749
.Linfo_string65:
	.asciz	"intmax_t"                      # string offset=760
.Linfo_string66:
	.asciz	"__uintmax_t"                   # string offset=769
.Linfo_string67:
	.asciz	"uintmax_t"                     # string offset=781
.Linfo_string68:
	.asciz	"_Z5twicePf"                    # string offset=791
.Linfo_string69:
	.asciz	"twice"                         # string offset=802
.Linfo_string70:
	.asciz	"x"                             # string offset=808
	.ident	"clang version 22.1.8"
	.section	".note.GNU-stack","",@progbits
	.addrsig
	.addrsig_sym __ubsan_handle_type_mismatch_v1
	.section	.debug_line,"",@progbits
.Lline_table_start0:
