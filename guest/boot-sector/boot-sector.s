# The smallest guest that can tell whether its memory is whole: 512 bytes, no operating system.
#
# It runs where Linux guests do not, above all under KVM nested in another machine. It writes pseudo-random words
# over 4 MiB from 2 MiB up and keeps their sum in a register. Each tick of the timer interrupt (18.2 a second) adds
# all words up again and prints on the serial port
#
#   tick N sum S                                     N decimal, S hexadecimal
#   CORRUPT sum expected S found S tick N            from then on, when the sums differ
#
# Memory against registers: a page that went stale in a checkpoint shows at the next tick. The sums follow from N
# alone. If interrupt controller or timer did not survive, it is silent.
# Under a KVM without hardware help (PVM) KVM's instruction emulator runs all of it, at less than
# a million instructions a second; a tick then takes about 90 ms instead of 55.
#
# Tried with QEMU 10.0.2; IMAGE is this sector, 64 MiB of memory are plenty:
#   -accel tcg, -machine pc or q35: -drive file=IMAGE,format=raw,if=floppy,readonly=on
#   -accel tcg or kvm, -machine pc: -drive file=IMAGE,format=raw,if=ide
#   -accel tcg or kvm, -machine q35: -nic none -device piix3-ide,id=pata
#       -drive if=none,id=disk,file=IMAGE,format=raw -device ide-hd,bus=pata.0,drive=disk
# The default CPU model works, and so does -cpu max,-arch-capabilities; plain -cpu max or host makes
# QEMU abort under PVM (it cannot set MSR 0x10a). There the firmware also boots from nothing but a
# parallel IDE disk: floppy, AHCI and virtio need interrupts in its real-mode wait.
#
# Assemble: as --32, ld -m elf_i386 -Ttext 0x7c00 --oformat binary (cargo xtask guests).

        .intel_syntax noprefix

        .set MEMORY, 0x200000           # first watched byte
        .set BYTES, 4 << 20             # watched bytes: 1024 pages
        .set SPACING, 512               # bytes from one used word to the next: 8 a page
        .set WRITES, 256                # words written a tick
        .set TIMER_VECTOR, 8            # where the firmware puts timer interrupts
        .set SERIAL_DATA, 0x3f8
        .set SERIAL_STATUS, 0x3fd

        .code16
        .globl _start
_start:
        cli
        ljmp    0, offset real          # the firmware may have come in with another segment
real:
        xor     ax, ax
        mov     ds, ax
        in      al, 0x92                # open address line 20
        or      al, 2
        out     0x92, al
        lgdt    [gdt_pointer]
        mov     eax, cr0
        or      al, 1
        mov     cr0, eax
        ljmp    0x08, offset protected

        .code32
protected:
        mov     ax, 0x10
        mov     ds, ax
        mov     es, ax
        mov     ss, ax
        mov     esp, 0x7c00
        lidt    [idt_pointer]
        mov     al, 0xfe                # let the timer through, nothing else
        out     0x21, al
        mov     al, 0xff
        out     0xa1, al

        xor     eax, eax                # memory starts at zero, and so does its sum
        mov     edi, MEMORY
        mov     ecx, BYTES / 4
        cld
        rep     stosd

        xor     ebx, ebx                # the generator
        xor     ebp, ebp                # the sum that must be
        xor     edi, edi                # the tick
tick:
        call    wait_for_timer
        mov     ecx, WRITES
write:
        imul    ebx, ebx, 1664525
        add     ebx, 1013904223
        mov     eax, ebx
        shr     eax, 10                 # the high bits, the better ones, choose the word
        and     eax, BYTES - SPACING
        sub     ebp, [MEMORY + eax]
        mov     [MEMORY + eax], ebx
        add     ebp, ebx
        loop    write

        xor     edx, edx                # the sum that is
        mov     ecx, BYTES - SPACING
add_up:
        add     edx, [MEMORY + ecx]
        sub     ecx, SPACING
        jns     add_up

        cmp     edx, ebp
        jne     corrupt
        call    say_tick
        mov     esi, offset sum_text
        call    say_text
        mov     eax, edx
        call    say_hexadecimal
        call    say_end
        jmp     tick

corrupt:                                # memory is left alone from here on
        mov     esi, offset corrupt_text
        call    say_text
        mov     eax, ebp
        call    say_hexadecimal
        mov     esi, offset found_text
        call    say_text
        mov     eax, edx
        call    say_hexadecimal
        mov     al, ' '
        call    say_byte
        call    say_tick
        call    say_end
        call    wait_for_timer
        jmp     corrupt

wait_for_timer:                         # and count the tick in edi
        inc     edi
        sti                             # takes effect after hlt: no interrupt is lost between
        hlt
        # Only the interrupt leads on from here. It comes back by dropping what it pushed (place, segment, flags),
        # with interrupts off. The instruction emulator of KVM runs all of this where the processor gives no help;
        # it has no iret for protected mode.
timer:
        add     esp, 12
        mov     al, 0x20                # end of interrupt
        out     0x20, al
        ret

say_tick:
        mov     esi, offset tick_text
        call    say_text
        mov     eax, edi
        mov     ecx, 10
        jmp     say_number

say_hexadecimal:
        mov     ecx, 16
say_number:                             # eax to the base ecx; edx kept
        push    edx
        xor     edx, edx
        div     ecx
        test    eax, eax
        jz      digit
        call    say_number
digit:
        mov     al, dl
        pop     edx
        add     al, '0'
        cmp     al, '9'
        jbe     say_byte
        add     al, 'a' - '9' - 1
        jmp     say_byte

say_end:
        mov     al, '\n'
say_byte:                               # al; all registers kept
        push    edx
        push    eax
        mov     edx, SERIAL_STATUS
busy:
        in      al, dx
        test    al, 0x20                # the transmitter is free
        jz      busy
        pop     eax
        mov     edx, SERIAL_DATA
        out     dx, al
        pop     edx
        ret

say_text:                               # from esi to the zero byte
        lodsb
        test    al, al
        jz      said
        call    say_byte
        jmp     say_text
said:
        ret

tick_text:      .asciz "tick "
sum_text:       .asciz " sum "
corrupt_text:   .asciz "CORRUPT sum expected "
found_text:     .asciz " found "

        .balign 8
gdt:
        .quad   0                       # its first entry is never used
        .quad   0x00cf9b000000ffff      # 0x08: code, all 4 GiB
        .quad   0x00cf93000000ffff      # 0x10: data, all 4 GiB
gdt_pointer:
        .word   . - gdt - 1
        .long   gdt

idt:                                    # one gate; the table would begin TIMER_VECTOR gates earlier
        .word   timer                   # the code lies below 64 KiB: the low half says it all
        .word   0x08
        .word   0x8e00                  # present interrupt gate
        .word   0
idt_pointer:
        .word   TIMER_VECTOR * 8 + 7
        .long   idt - TIMER_VECTOR * 8

        .org    510
        .word   0xaa55                  # what makes the sector bootable
